"""RayConfig: what Ray Serve is told, in words that a command line and a configuration file have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.server.adapters.served_models import NamedPath
from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.running_server import ServerConfig
from trt_lora.runtime.serving.serving_config import ServingConfig

_HEALTH_S = 2.0  # between two looks at a replica's engine
_HANG_S = 10.0  # until an engine that does not answer is one that hangs
_QUEUED = 9  # requests of a row, the one that has it among them: the server's own limit
_STREAMS = 16  # of ingresses, which are requests to Ray, too


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One application of Ray Serve; flags of `trt-lora serve` have the same names here."""

    engine: str  # a directory that every machine has
    lora_dir: str | None = None  # that every machine has, and every replica follows
    lora_dir_refresh: float = ServerConfig.lora_dir_refresh_s
    # Folders below which adapters may lie that are loaded over HTTP; on a command line one.
    lora_root: list[str] | str = []
    # NAME=PATH, or vLLM's JSON, of adapters that every replica loads at its start.
    lora_modules: list[str] | str = []
    served_model_name: str | None = None
    backend: str = "auto"
    max_num_seqs: int | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    allowed_host: str | None = None  # "*": any
    allow_runtime_lora_updating: bool = False
    replicas: int = 1
    max_replicas: int = 0  # as many as requests need, above `replicas`
    target_requests: int = 0  # of a replica, before there is another one; 0: its rows
    upscale_delay: float = 30.0  # seconds that they are needed before they come
    downscale_delay: float = 600.0  # and not needed before they go
    num_gpus: float = 0.0  # of each replica
    num_cpus: float = 1.0
    spill_after: int = 8  # requests that a replica may have more than the least busy one
    max_queued_requests: int = 256  # that wait for a replica, in each ingress
    graceful_shutdown_s: float = 60.0  # that a replica has to end its answers

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "RayConfig":
        """Read `key=value` pairs.

        Raises:
            ConfigError: a key is unknown, `engine` is missing, or a value has no meaning.
        """
        try:
            made = msgspec.convert(dict(given), cls, strict=False)
        except msgspec.ValidationError as error:
            names = ", ".join(field.name for field in msgspec.structs.fields(cls))
            raise ConfigError(f"{error}; expected engine=DIR, and any of {names}") from error
        check_range("replicas", made.replicas, 1)
        check_range("spill_after", made.spill_after, 0)
        if made.max_replicas and made.max_replicas < made.replicas:
            raise ConfigError(
                f"max_replicas is {made.max_replicas}, below replicas, {made.replicas}"
            )
        return made

    @property
    def base(self) -> str:
        """The name of the base model."""
        return self.served_model_name or self.engine

    def deployment(self, rows: int) -> dict[str, Any]:
        """Return the options of the replicas' deployment.

        Args:
            rows: of each engine, most.
        """
        rows = self.max_num_seqs or rows
        scale: dict[str, Any] = {"num_replicas": self.replicas}
        if self.max_replicas:
            wanted = {"min_replicas": self.replicas, "max_replicas": self.max_replicas}
            wanted |= {"target_ongoing_requests": self.target_requests or rows}
            delays = {"upscale_delay_s": self.upscale_delay}
            delays |= {"downscale_delay_s": self.downscale_delay}
            scale = {"autoscaling_config": wanted | delays}
        return scale | {
            "max_ongoing_requests": _QUEUED * rows + _STREAMS,
            "max_queued_requests": self.max_queued_requests,
            "graceful_shutdown_timeout_s": self.graceful_shutdown_s,
            "health_check_period_s": _HEALTH_S,
            "health_check_timeout_s": _HANG_S,
            "ray_actor_options": {"num_gpus": self.num_gpus, "num_cpus": self.num_cpus},
        }

    @property
    def server(self) -> ServerConfig:
        """What each replica serves.

        Raises:
            ConfigError: `lora_modules` has what cannot be read.
        """
        modules = list(map(NamedPath.of, _listed(self.lora_modules)))
        return ServerConfig(
            directory=Path(self.engine),
            backend=self.backend,
            names=[self.base],
            lora_roots=[Path(p) for p in (*_listed(self.lora_root), *(m.path for m in modules))],
            lora_modules=modules,
            lora_dir=Path(self.lora_dir) if self.lora_dir else None,
            lora_dir_refresh_s=self.lora_dir_refresh,
            serving=ServingConfig(rows=self.max_num_seqs),
        )

    def application(self) -> Server:
        """Return a server of the engine, which is not open yet."""
        return Server(self.server, self.guard, allows_updates=self.allow_runtime_lora_updating)

    @property
    def guard(self) -> GuardConfig:
        """Who may ask."""
        hosts = [self.allowed_host] if self.allowed_host else []
        return GuardConfig(
            api_keys=[self.api_key] if self.api_key else [],
            admin_key=self.admin_api_key,
            allowed_hosts=(*GuardConfig.allowed_hosts, *hosts),
        )


def _listed(given: list[str] | str) -> list[str]:
    return [given] if isinstance(given, str) else given
