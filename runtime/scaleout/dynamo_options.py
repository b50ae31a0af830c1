"""DynamoOptions: what a worker of Dynamo is told by its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.open_executor import BACKENDS

_DISCOVERY = ("etcd", "kubernetes", "file", "mem")
_PLACES = (
    *("namespace", "component", "endpoint", "endpoint_types", "discovery_backend"),
    *("request_plane", "response_plane", "event_plane"),
)


@dataclass(frozen=True)
class DynamoOptions:
    """A worker: its engine, its adapters, and where it is found."""

    engine: Path  # its directory
    served_model_name: str | None = None  # of the base model; None: the directory's name
    lora_dir: Path | None = None  # of adapters, the same for all workers; None: the base model only
    backend: str = "auto"  # see `open_executor`
    max_num_seqs: int | None = None  # rows; None: the engine's largest batch
    max_gpu_lora_count: int | None = None  # told the front end; None: the slots, 0: nothing
    max_cpu_loras: int | None = None  # in memory, of the largest rank; None: no limit
    namespace: str = "dynamo"
    component: str = "backend"
    endpoint: str = "generate"
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    response_plane: str = "tcp"
    event_plane: str | None = None
    dyn_tool_call_parser: str | None = None
    dyn_reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        """Refuse a folder that is none, and a negative number.

        Raises:
            ConfigError: there is no such folder, or a number is too small.
        """
        if self.lora_dir is not None and not self.lora_dir.is_dir():
            raise ConfigError(f"--lora-dir is {self.lora_dir}, expected a folder; make it first")
        for name, least in (("max_num_seqs", 1), ("max_gpu_lora_count", 0), ("max_cpu_loras", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is {value}, expected a number from {least} on")

    @property
    def base(self) -> str:
        """The name of the base model."""
        return self.served_model_name or self.engine.resolve().name

    @property
    def model(self) -> str:
        """Where front ends of this machine find tokenizer and template."""
        return str(self.engine.resolve())

    @property
    def worker(self) -> dict[str, Any]:
        """The fields of Dynamo's `WorkerConfig`."""
        return {name: getattr(self, name) for name in _PLACES} | {
            "model_name": self.model,
            "served_model_name": self.base,
            "tool_call_parser": self.dyn_tool_call_parser,
            "reasoning_parser": self.dyn_reasoning_parser,
        }


def dynamo_options(argv: Sequence[str] | None = None) -> DynamoOptions:
    """Return what a command line says; None is that of the process.

    Raises:
        ConfigError: a folder or a number is wrong.
        SystemExit: an option is unknown, or help was asked for.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trt_lora.runtime.scaleout.dynamo",
        description="A worker of NVIDIA Dynamo over an engine.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    _add_engine(parser)
    _add_places(parser)
    return DynamoOptions(**vars(parser.parse_args(argv)))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--served-model-name", metavar="NAME", help="of the base model (the directory's)")
    add("--lora-dir", type=Path, metavar="DIR", help="of adapters; all workers need the same one")
    add("--backend", choices=BACKENDS, help="where the engine runs (auto)")
    add("--max-num-seqs", type=int, metavar="N", help="requests at a time (the largest batch)")
    add(
        "--max-gpu-lora-count",
        type=int,
        metavar="N",
        help="slots that the front end is told of; 0: none (the engine's)",
    )
    add("--max-cpu-loras", type=int, metavar="N", help="adapters in memory (no limit)")
    add("--dyn-tool-call-parser", metavar="NAME", help="of the front end")
    add("--dyn-reasoning-parser", metavar="NAME", help="of the front end")


def _add_places(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, {f.name: f.default for f in fields(DynamoOptions)}
    for name in ("namespace", "component", "endpoint", "endpoint-types"):
        add(f"--{name}", metavar="NAME", help=f"of the worker ({default[name.replace('-', '_')]})")
    add("--discovery-backend", choices=_DISCOVERY, help="where workers are found (etcd)")
    add("--request-plane", choices=("tcp", "nats"), help="how requests come (tcp)")
    add("--response-plane", choices=("tcp", "quic"), help="how answers go (tcp)")
    add("--event-plane", choices=("nats", "zmq"), help="how events go (Dynamo's own choice)")
