"""MAX's LoRA options: each holds for the engine, or is refused."""

from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.checked import check_fields, checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.interfaces.agreed_limits import check_rank, check_slots, limits_of_slots
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore


@short_repr
@dataclass(frozen=True)
class LoRAConfig:
    """MAX's `LoRAConfig`; None is what the engine was built with."""

    enable_lora: bool = False
    lora_paths: tuple[str, ...] = ()  # loaded at once, each "name=path" or a path
    max_lora_rank: int | None = None
    max_num_loras: int | None = None  # adapters on the device at a time
    allowed_roots: tuple[str | Path, ...] = ()  # ours: folders that requests may load from

    def __post_init__(self) -> None:
        """Refuse what is no value of an option.

        Raises:
            ConfigError: a field has another type.
        """
        check_fields(self)

    @checked
    def store_config(self, manifest: Manifest) -> StoreConfig:
        """Return the limits of `max_num_loras` slots.

        Raises:
            ConfigError: the engine has fewer.
        """
        return limits_of_slots("max_num_loras", self.max_num_loras, manifest)

    @checked
    def check(self, adapters: AdapterStore) -> None:
        """Refuse options that these adapters do not have.

        Raises:
            ConfigError: LoRA is off, or a limit is another than theirs.
        """
        if not self.enable_lora:
            raise ConfigError("enable_lora is False; pass enable_lora=True, or make no manager")
        check_rank("max_lora_rank", self.max_lora_rank, adapters.manifest)
        check_slots("max_num_loras", self.max_num_loras, adapters)
