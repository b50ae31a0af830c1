"""Settings: the parameters of a model's config.pbtxt, which are strings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, shown
from trt_lora.runtime.engine import Engine, open_engine
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.interfaces.trtllm import LoraCacheOptions
from trt_lora.runtime.manifest import read_manifest

_TEXTS = ("engine", "adapters", "backend")


@dataclass(frozen=True)
class Settings:
    """An engine, its adapters, and bounds; what is left out has its default."""

    engine: str = ""  # a directory
    adapters: str = ""  # a folder of adapters, as `--lora-dir`; empty: none has a name
    backend: str = "auto"
    rows: int | None = None  # requests at a time; None: the engine's largest batch
    max_queue: int | None = None  # requests that wait beside those; None: 8 for each row
    max_logprobs: int = 20  # beside each token; -1 is no bound
    # See `LoraCacheOptions`, which has the same names and defaults.
    lora_cache_optimal_adapter_size: int | None = None
    lora_cache_max_adapter_size: int | None = None
    lora_cache_gpu_memory_fraction: float | None = None
    lora_cache_host_memory_bytes: int | None = LoraCacheOptions.lora_cache_host_memory_bytes

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: there is no engine, or no folder of adapters where one is named; or a
                number is out of its range.
        """
        if not self.engine:
            raise ConfigError("parameter 'engine' is missing: the directory of an engine")
        if self.adapters and not Path(self.adapters).is_dir():
            raise ConfigError(f"parameter 'adapters' is {self.adapters!r}, which is no folder")
        check_range("parameter 'rows'", self.rows, 1)
        check_range("parameter 'max_queue'", self.max_queue, 0)
        check_range("parameter 'max_logprobs'", self.max_logprobs, -1)

    def open(self) -> Engine:
        """Return the engine, to be used as a context manager.

        Raises:
            ManifestError, ConfigError, BackendError: as `open_engine`; or a `lora_cache_` parameter
                is not what the engine has.
        """
        given = {f.name: getattr(self, f.name) for f in fields(LoraCacheOptions)}
        manifest = read_manifest(self.engine)
        refuse_encoder(manifest, "Triton's backend")
        config = LoraCacheOptions(**given).store_config(manifest)
        return open_engine(self.engine, self.backend, adapters=config)


def read_settings(parameters: Mapping[str, Mapping[str, str]]) -> Settings:
    """Return what a model's configuration says.

    Args:
        parameters: as Triton gives them, `{"engine": {"string_value": "..."}}`. Its own are written
            in capitals, and are not looked at.

    Raises:
        ConfigError: a parameter is unknown, is no number, or as `Settings`.
    """
    known = [field.name for field in fields(Settings)]
    given = dict[str, Any]()
    for name, value in parameters.items():
        if name.isupper():
            continue
        if name not in known:
            raise ConfigError(
                f"parameter {name!r} is unknown, expected some of {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
        text = value.get("string_value", "")
        given[name] = text if name in _TEXTS else _number(name, text)
    return Settings(**given)


def _number(name: str, text: str) -> float | int:
    is_share = name == "lora_cache_gpu_memory_fraction"
    try:
        return float(text) if is_share else int(text)
    except ValueError as error:
        kind = "number" if is_share else "whole number"
        raise ConfigError(f"parameter {name!r} is {shown(text)}, expected a {kind}") from error
