"""`trt-lora serve`: vLLM's HTTP server for LoRA adapters, over an engine."""

import argparse
import json
import os
from pathlib import Path

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime import ServingConfig, open_engine
from trt_lora.runtime.engines.open_executor import BACKENDS

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("--host", default="127.0.0.1", help="address to listen at")
    add("--port", type=int, default=8000, help="port to listen at")
    add("--uds", metavar="PATH", help="Unix socket to listen at instead")
    add("--api-key", nargs="+", default=[], metavar="KEY", help="of the header Authorization")
    add("--allow-unauthenticated", action="store_true", help="off loopback, without a key")
    add("--allowed-host", nargs="+", default=[], metavar="NAME", help="of the header Host")
    add("--served-model-name", nargs="+", metavar="NAME", help="of the base model")
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters to load")
    add(
        "--lora-root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="below which adapters may lie",
    )
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at a time")
    add("--max-num-batched-tokens", type=int, metavar="N", help="of prompts in a step")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer")
    add("--max-loras", type=int, default=1, metavar="N", help="the engine's slots")
    add("--max-lora-rank", type=int, default=16, metavar="N", help="the engine's")
    add("--max-cpu-loras", type=int, metavar="N", help="adapters in memory")
    add("--gpu-memory-utilization", type=float, default=0.9, help="without effect: engines know")
    add("--enable-lora", action="store_true", help="without effect: adapters are always taken")
    add("--enforce-eager", action="store_true", help="without effect")
    add("--enable-chunked-prefill", action="store_true", help="without effect: prompts are")
    add("--enable-request-id-headers", action="store_true", help="X-Request-Id comes back")
    add("--enable-force-include-usage", action="store_true", help="streams tell their usage")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    parser.set_defaults(command=_serve)


def _serve(args: argparse.Namespace) -> None:
    try:
        import uvicorn

        from trt_lora.runtime.server.app import GuardConfig, ServerConfig, application
    except ImportError as error:
        raise BackendError("serve needs the extra: pip install 'trt-lora[serve]'") from error
    keys = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    is_local = args.uds is not None or args.host in _LOOPBACK
    if not is_local and not keys and not args.allow_unauthenticated:
        raise ConfigError(
            f"--host is {args.host}, which others reach: give --api-key, or --allow-unauthenticated"
        )
    hosts = (
        ("*",)
        if not is_local and not args.allowed_host
        else (*_LOOPBACK, "[::1]", *args.allowed_host)
    )
    guard = GuardConfig(keys, ("*",) if args.uds else hosts, args.enable_request_id_headers)
    modules = [_module(item) for item in args.lora_modules]
    config = ServerConfig(
        names=args.served_model_name or [str(args.engine)],
        lora_roots=[*args.lora_root, *(Path(path) for _, path in modules)],
        lora_modules=modules,
        allows_updates=os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower()
        in ("1", "true"),
        forces_usage=args.enable_force_include_usage,
        guard=guard,
        serving=ServingConfig(
            rows=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
        ),
    )
    with open_engine(args.engine, args.backend) as engine:
        uvicorn.run(
            application(engine, config),
            host=args.host,
            port=args.port,
            uds=args.uds,
            log_level="warning",
            access_log=False,
        )


def _module(item: str) -> tuple[str, str]:
    if item.startswith("{"):
        given = json.loads(item)
        return given["name"], given["path"]
    name, _, path = item.partition("=")
    return name, path
