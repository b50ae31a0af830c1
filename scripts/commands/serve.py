"""`trt-lora serve`: vLLM's HTTP server for LoRA adapters, over an engine."""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime import ServingConfig
from trt_lora.runtime.engines.open_executor import BACKENDS
from trt_lora.runtime.server.log_lines import FORMATS, LEVELS, LogConfig
from trt_lora.scripts.commands.vllm_flags import add_vllm_flags, check_vllm_flags, normalised

__all__ = ["add_options", "normalised"]

if TYPE_CHECKING:
    from trt_lora.runtime.server.running_server import ServerConfig

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_LOG = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand: vLLM's, and ours."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    add("--json", action="store_true", help="say why it fails in one JSON object, too")
    add("--in-process", action="store_true", help="run the engine in this process, to debug")
    _add_address(parser)
    _add_safety(parser)
    _add_log(parser)
    _add_adapters(parser)
    _add_limits(parser)
    _add_answers(parser)
    add_vllm_flags(parser)
    parser.allow_abbrev = False
    parser.set_defaults(command=_serve)


def _group(parser: argparse.ArgumentParser, title: str) -> Callable[..., argparse.Action]:
    """Begin a group of options; one that is not given leaves its default to its configuration."""
    group = parser.add_argument_group(title)
    group.argument_default = argparse.SUPPRESS
    return group.add_argument


def _add_address(parser: argparse.ArgumentParser) -> None:
    add = _group(parser, "address")
    add("--host", help="address to listen at (127.0.0.1)")
    add("--port", type=int, help="port to listen at (8000)")
    add("--uds", metavar="PATH", help="Unix socket to listen at instead")
    add("--disable-fastapi-docs", action="store_true", default=False, help="no /openapi.json")
    add("--no-page", dest="shows_page", action="store_false", default=True, help="no page at /")
    add("--root-path", metavar="PATH", help="behind a proxy that strips it")
    add("--ssl-keyfile", metavar="FILE", help="key of the certificate")
    add("--ssl-certfile", metavar="FILE", help="certificate: HTTPS instead of HTTP")
    add("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates")
    add("--ssl-cert-reqs", type=int, metavar="N", help="2: clients need a certificate")
    add(
        "--drain-grace",
        dest="drain_grace_s",
        type=float,
        metavar="S",
        help="seconds that requests are taken after SIGTERM (5)",
    )
    add(
        "--shutdown-timeout",
        dest="shutdown_timeout_s",
        type=float,
        metavar="S",
        help="seconds that answers then have to end (30)",
    )


def _add_safety(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who may ask").add_argument
    add(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="of the header Authorization; also VLLM_API_KEY",
    )
    add("--admin-api-key", metavar="KEY", help="the only one that changes adapters")
    add("--allow-unauthenticated", action="store_true", help="off loopback, without a key")
    add(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="adapters are loaded and unloaded over HTTP; also VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    )
    add(
        "--allowed-host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of the header Host, beside loopback",
    )


def _add_log(parser: argparse.ArgumentParser) -> None:
    add = _group(parser, "what is told of requests")
    add("--log-format", choices=FORMATS, help="of the log on standard error (text)")
    add("--log-level", type=str.lower, choices=LEVELS, help="of the server's log (info)")
    add("--uvicorn-log-level", type=str.lower, metavar="LEVEL", help="of uvicorn's (warning)")
    add(
        "--disable-uvicorn-access-log",
        action="store_true",
        default=False,
        help="no line of each request",
    )
    add(
        "--disable-access-log-for-endpoints",
        dest="quiet_paths",
        type=lambda text: text.split(","),
        metavar="PATHS",
        help="comma-separated, without such lines",
    )
    add("--otlp-traces-endpoint", metavar="URL", help="to which OpenTelemetry's spans are sent")
    add(
        "--enable-request-id-headers",
        action="store_true",
        default=False,
        help="X-Request-Id comes back",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("models and adapters").add_argument
    add("--served-model-name", nargs="+", metavar="NAME", help="of the base model")
    add("--enable-lora", action="store_true", help="adapters are always taken")
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters to load")
    add(
        "--lora-root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="below which adapters may lie that are loaded over HTTP",
    )
    add(
        "--lora-dir",
        type=Path,
        metavar="DIR",
        help="whose adapters are served, and followed as they come, change and go",
    )
    add(
        "--lora-dir-refresh",
        dest="lora_dir_refresh_s",
        type=float,
        default=argparse.SUPPRESS,
        metavar="S",
        help="seconds from one look at it to the next (5)",
    )
    add(
        "--lora-hub-repos",
        nargs="+",
        metavar="ORG/REPO",
        help="of the Hugging Face hub, whose adapters are loaded when a request names them",
    )
    add("--max-loras", type=int, metavar="N", help="adapters that a step can use; the engine's")
    add("--max-lora-rank", type=int, metavar="N", help="largest rank; the engine's")
    add("--max-cpu-loras", type=int, metavar="N", help="adapters in memory; no limit")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = _group(parser, "limits")
    add(
        "--max-model-len",
        type=_count,
        metavar="N",
        help="tokens of prompt and answer; the engine's",
    )
    add(
        "--kv-cache-memory-bytes",
        dest="cache_bytes",
        type=_count,
        metavar="N",
        help="of as many requests as fit",
    )
    add(
        "--enable-prefix-caching",
        action="store_true",
        default=True,
        help="share prefixes of prompts (always, unless --no-enable-prefix-caching)",
    )
    add("--dtype", type=_dtype, help="the engine's (auto); another one is refused")
    add(
        "--max-num-seqs",
        dest="rows",
        type=int,
        metavar="N",
        help="requests that run at a time; the engine's",
    )
    add("--max-num-batched-tokens", type=_count, metavar="N", help="of prompts in a step")
    add("--max-num-queued-reqs", type=int, metavar="N", help="that wait; 8 for each that runs")
    add("--max-num-queued-tokens", type=_count, metavar="N", help="of prompts that wait; no limit")
    add("--max-client-requests", type=int, metavar="N", help="of one key or address; no limit")
    add(
        "--queue-timeout",
        dest="queue_timeout_s",
        type=float,
        metavar="S",
        help="seconds to the first token (60)",
    )
    add("--max-logprobs", type=int, metavar="N", help="beside each token (20)")


def _add_answers(parser: argparse.ArgumentParser) -> None:
    add = _group(parser, "answers")
    add(
        "--generation-config",
        default="auto",
        metavar="auto|vllm|DIR",
        help="what is recommended: by the engine's, by none, by that folder's",
    )
    add(
        "--sse-keep-alive-interval",
        dest="keep_alive_s",
        type=float,
        metavar="S",
        help="seconds between comments in a stream that has nothing to say",
    )
    add(
        "--enable-force-include-usage",
        action="store_true",
        default=False,
        help="streams tell their usage",
    )
    add(
        "--return-tokens-as-token-ids",
        action="store_true",
        default=False,
        help="in log probabilities",
    )
    add(
        "--enable-prompt-tokens-details",
        action="store_true",
        default=False,
        help="usage tells how many tokens of a prompt were not run",
    )
    add(
        "--enable-per-request-metrics",
        action="store_true",
        default=False,
        help="answers tell how long they took",
    )
    add(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        default=False,
        help="/tokenizer_info tells the tokenizer's configuration",
    )
    add("--stream-interval", type=int, metavar="N", help="tokens that an event has, least (1)")


def _serve(args: argparse.Namespace) -> None:
    try:
        from trt_lora.runtime.server.app import Server
        from trt_lora.runtime.server.draining_server import WebConfig, serve
        from trt_lora.runtime.server.guard import GuardConfig
        from trt_lora.runtime.server.telemetry.request_log import RequestLogConfig
    except ImportError as error:
        raise BackendError(f"{error}; pip install 'trt-lora[serve]'") from error
    for line in check_vllm_flags(args):
        _LOG.warning("%s", line)
    keys = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    updates = args.allow_runtime_lora_updating or _is_true("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    web = WebConfig(**_given(WebConfig, args))
    is_local = web.uds is not None or web.host in _LOOPBACK
    if not is_local:
        _check_safety(args, web.host, keys, updates=updates)
    is_any_host = web.uds is not None or (bool(keys) and not is_local and not args.allowed_host)
    guard = GuardConfig(
        api_keys=keys,
        admin_key=args.admin_api_key,
        allowed_hosts=("*",) if is_any_host else (*_LOOPBACK, "[::1]", *args.allowed_host),
        allows_addresses=not is_local,
        root_path=web.root_path,
    )
    config = _config(args, updates=updates)
    server = Server(
        config,
        guard,
        RequestLogConfig(
            returns_ids=args.enable_request_id_headers,
            has_lines=not args.disable_uvicorn_access_log,
            **_given(RequestLogConfig, args),
        ),
        allows_updates=updates,
        shows_openapi=not args.disable_fastapi_docs,
        shows_page=args.shows_page,
    )
    if status := serve(server, web, config.log):
        raise SystemExit(status)


def _given(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a configuration that options have, by their names."""
    names = [field.name for field in fields(kind)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _check_safety(
    args: argparse.Namespace, host: str, keys: Sequence[str], *, updates: bool
) -> None:
    """Refuse to serve others what was not meant for them."""
    if not keys and not args.allow_unauthenticated:
        raise ConfigError(
            f"--host is {host}, which others reach: give --api-key, or --allow-unauthenticated"
        )
    if updates and not args.admin_api_key:
        raise ConfigError(
            f"--host is {host}, and adapters may be loaded over HTTP: give --admin-api-key"
        )


def _config(args: argparse.Namespace, *, updates: bool) -> "ServerConfig":
    from trt_lora.runtime.server.adapters.served_models import NamedPath
    from trt_lora.runtime.server.admission import AdmissionConfig
    from trt_lora.runtime.server.answers.answering import AnswerOptions
    from trt_lora.runtime.server.running_server import ServerConfig

    modules = list(map(NamedPath.of, args.lora_modules))
    own: dict[str, Any] = {
        "directory": args.engine,
        "names": args.served_model_name or [str(args.engine)],
        "lora_roots": [*args.lora_root, *(Path(module.path) for module in modules)],
        "lora_modules": modules,
        **_resolvers(args, updates=updates),
        "generation_config": {"auto": args.engine, "vllm": None}.get(
            args.generation_config, Path(args.generation_config)
        ),
        "answers": AnswerOptions(
            forces_usage=args.enable_force_include_usage,
            tokens_as_ids=args.return_tokens_as_token_ids,
            tells_cached_tokens=args.enable_prompt_tokens_details,
            tells_times=args.enable_per_request_metrics,
            shows_tokenizer=args.enable_tokenizer_info_endpoint,
            **_given(AnswerOptions, args),
        ),
        "admission": AdmissionConfig(**_given(AdmissionConfig, args)),
        "serving": ServingConfig(
            shares_prefixes=args.enable_prefix_caching, **_given(ServingConfig, args)
        ),
        "log": LogConfig(**_given(LogConfig, args)),
    }
    return ServerConfig(**_given(ServerConfig, args) | own)


def _resolvers(args: argparse.Namespace, *, updates: bool) -> dict[str, Any]:
    """Where adapters are looked for by name: as options say, or as vLLM's variables do."""

    def by_variable(variable: str, plugin: str) -> str:
        plugins = os.environ.get("VLLM_PLUGINS")  # unset: all of them
        is_asked = updates and (plugins is None or plugin in plugins.split(","))
        return os.environ.get(variable, "") if is_asked else ""

    folder = by_variable("VLLM_LORA_RESOLVER_CACHE_DIR", "lora_filesystem_resolver")
    repos = by_variable("VLLM_LORA_RESOLVER_HF_REPO_LIST", "lora_hf_hub_resolver")
    return {
        "lora_dir": args.lora_dir or (Path(folder) if folder else None),
        "hub_repos": args.lora_hub_repos or [*filter(None, map(str.strip, repos.split(",")))],
    }


def _dtype(text: str) -> str | None:
    return None if text == "auto" else text


def _count(text: str) -> int | None:
    """A number as vLLM takes it: 32k is 32,000 and 32K 32,768; auto and -1 are the engine's."""
    if text in ("auto", "-1"):
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    return int(float(number) * _UNITS.get(unit, 1))


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true")
