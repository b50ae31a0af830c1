"""`trt-lora serve`: vLLM's HTTP server for LoRA adapters, over an engine."""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.engines.open_executor import BACKENDS
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
    _add_adapters(parser)
    _add_limits(parser)
    _add_answers(parser)
    add_vllm_flags(parser)
    parser.allow_abbrev = False
    parser.set_defaults(command=_serve)


def _add_address(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("address").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen at (8000)")
    add("--uds", metavar="PATH", help="Unix socket to listen at instead")
    add("--disable-fastapi-docs", action="store_true", help="no /openapi.json")
    add("--uvicorn-log-level", default="warning", metavar="LEVEL", help="of the web server's log")
    add("--root-path", default="", metavar="PATH", help="behind a proxy that strips it")
    add("--ssl-keyfile", metavar="FILE", help="key of the certificate")
    add("--ssl-certfile", metavar="FILE", help="certificate: HTTPS instead of HTTP")
    add("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates")
    add("--ssl-cert-reqs", type=int, default=0, metavar="N", help="2: clients need a certificate")
    add(
        "--drain-grace",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds that requests are taken after SIGTERM (5)",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
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
    add("--enable-request-id-headers", action="store_true", help="X-Request-Id comes back")


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
    add("--max-loras", type=int, metavar="N", help="adapters that a step can use; the engine's")
    add("--max-lora-rank", type=int, metavar="N", help="largest rank; the engine's")
    add("--max-cpu-loras", type=int, metavar="N", help="adapters in memory; no limit")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add(
        "--max-model-len",
        type=_count,
        metavar="N",
        help="tokens of prompt and answer; the engine's",
    )
    add("--kv-cache-memory-bytes", type=_count, metavar="N", help="of as many requests as fit")
    add(
        "--enable-prefix-caching",
        action="store_true",
        default=True,
        help="share prefixes of prompts (always, unless --no-enable-prefix-caching)",
    )
    add("--dtype", default="auto", help="the engine's; another one is refused")
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at a time; the engine's")
    add("--max-num-batched-tokens", type=_count, metavar="N", help="of prompts in a step")
    add("--max-num-queued-reqs", type=int, metavar="N", help="that wait; 8 for each that runs")
    add("--max-num-queued-tokens", type=_count, metavar="N", help="of prompts that wait; no limit")
    add("--max-client-requests", type=int, metavar="N", help="of one key or address; no limit")
    add(
        "--queue-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to the first token (60)",
    )
    add("--max-logprobs", type=int, default=20, metavar="N", help="beside each token (20)")


def _add_answers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("answers").add_argument
    add(
        "--generation-config",
        default="auto",
        metavar="auto|vllm|DIR",
        help="what is recommended: by the engine's, by none, by that folder's",
    )
    add(
        "--sse-keep-alive-interval",
        type=float,
        metavar="S",
        help="seconds between comments in a stream that has nothing to say",
    )
    add("--enable-force-include-usage", action="store_true", help="streams tell their usage")
    add("--return-tokens-as-token-ids", action="store_true", help="in log probabilities")


def _serve(args: argparse.Namespace) -> None:
    try:
        from trt_lora.runtime.server.app import Server
        from trt_lora.runtime.server.draining_server import WebConfig, serve
        from trt_lora.runtime.server.guard import GuardConfig
    except ImportError as error:
        raise BackendError(f"{error}; pip install 'trt-lora[serve]'") from error
    for line in check_vllm_flags(args):
        _LOG.warning("%s", line)
    keys = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    updates = args.allow_runtime_lora_updating or _is_true("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    is_local = args.uds is not None or args.host in _LOOPBACK
    _check_safety(args, keys, is_local=is_local, updates=updates)
    is_any_host = args.uds is not None or (not is_local and not args.allowed_host)
    guard = GuardConfig(
        api_keys=keys,
        admin_key=args.admin_api_key,
        allowed_hosts=("*",) if is_any_host else (*_LOOPBACK, "[::1]", *args.allowed_host),
        returns_ids=args.enable_request_id_headers,
    )
    web = WebConfig(
        host=args.host,
        port=args.port,
        uds=args.uds,
        root_path=args.root_path,
        log_level=args.uvicorn_log_level,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        drain_grace_s=args.drain_grace,
        shutdown_timeout_s=args.shutdown_timeout,
    )
    server = Server(
        _config(args),
        guard,
        allows_updates=updates,
        shows_openapi=not args.disable_fastapi_docs,
    )
    status = serve(server, web)
    if status:
        raise SystemExit(status)


def _check_safety(
    args: argparse.Namespace, keys: Sequence[str], *, is_local: bool, updates: bool
) -> None:
    if is_local:
        return
    if not keys and not args.allow_unauthenticated:
        raise ConfigError(
            f"--host is {args.host}, which others reach: give --api-key, or --allow-unauthenticated"
        )
    if updates and not args.admin_api_key:
        raise ConfigError(
            f"--host is {args.host}, and adapters may be loaded over HTTP: give --admin-api-key"
        )


def _config(args: argparse.Namespace) -> "ServerConfig":
    from trt_lora.runtime.server.admission import AdmissionConfig
    from trt_lora.runtime.server.answers.answering import AnswerOptions
    from trt_lora.runtime.server.running_server import ServerConfig
    from trt_lora.runtime.serving.serving_config import ServingConfig

    modules = [_module(item) for item in args.lora_modules]
    return ServerConfig(
        directory=args.engine,
        backend=args.backend,
        in_process=args.in_process,
        names=args.served_model_name or [str(args.engine)],
        lora_roots=[*args.lora_root, *(Path(path) for _, path in modules)],
        lora_modules=modules,
        dtype=None if args.dtype == "auto" else args.dtype,
        max_model_len=args.max_model_len,
        max_lora_rank=args.max_lora_rank,
        max_loras=args.max_loras,
        max_cpu_loras=args.max_cpu_loras,
        generation_config={"auto": args.engine, "vllm": None}.get(
            args.generation_config, Path(args.generation_config)
        ),
        answers=AnswerOptions(
            forces_usage=args.enable_force_include_usage,
            max_logprobs=args.max_logprobs,
            tokens_as_ids=args.return_tokens_as_token_ids,
            keep_alive_s=args.sse_keep_alive_interval,
        ),
        admission=AdmissionConfig(
            args.max_num_queued_reqs,
            args.max_num_queued_tokens,
            args.max_client_requests,
            args.queue_timeout,
        ),
        serving=ServingConfig(
            rows=args.max_num_seqs,
            cache_bytes=args.kv_cache_memory_bytes,
            max_num_batched_tokens=args.max_num_batched_tokens,
            shares_prefixes=args.enable_prefix_caching,
        ),
    )


def _count(text: str) -> int | None:
    """A number as vLLM takes it: 32k is 32,000 and 32K 32,768; auto and -1 are the engine's."""
    if text in ("auto", "-1"):
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    return int(float(number) * _UNITS.get(unit, 1))


def _module(item: str) -> tuple[str, str]:
    """The name and the path of `NAME=PATH`, or of vLLM's JSON."""
    try:
        if item.startswith("{"):
            given = json.loads(item)
            return given["name"], given["path"]
        name, path = item.split("=", 1)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--lora-modules has {item!r}, expected NAME=PATH, or JSON with name and path"
        ) from error
    return name, path


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true")
