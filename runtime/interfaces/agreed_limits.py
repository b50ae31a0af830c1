"""Limits that a config states and an engine has: both say the same, or the config is refused."""

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.slot_stacks import slot_nbytes
from trt_lora.runtime.store.store import AdapterStore


def check_rank(option: str, rank: int | None, manifest: Manifest) -> None:
    """Refuse another maximum rank than the engine's, which is what adapters are held to.

    Raises:
        ConfigError: it is another.
    """
    if rank not in (None, manifest.max_lora_rank):
        raise ConfigError(
            f"{option} is {rank}, this engine takes adapters up to rank {manifest.max_lora_rank}; "
            f"pass {option}={manifest.max_lora_rank}, or build one with --max-lora-rank {rank}"
        )


def check_slots(option: str, slots: int | None, adapters: AdapterStore) -> int:
    """Return how many slots there are; refuse another number of adapters on the device.

    Raises:
        ConfigError: it is another, or the engine takes one adapter at a time.
    """
    count = adapters.bindings.slot_count
    if count is None:
        raise ConfigError(
            f"this engine of {adapters.manifest.base_model.name} takes one adapter at a time: it "
            "has no slots; build one with --max-loras 8"
        )
    if slots not in (None, count):
        raise ConfigError(
            f"{option} is {slots}, these adapters have {count} slots; open the engine with "
            "adapters=config.store_config(read_manifest(directory)), or build one with "
            f"--max-loras {slots}"
        )
    return count


def limits_of_slots(option: str, slots: int | None, manifest: Manifest) -> StoreConfig:
    """Return the limits of so many slots, and of a host without any; None is all slots.

    Raises:
        ConfigError: the engine has fewer.
    """
    if slots is None:
        return StoreConfig()
    if not 1 <= slots <= manifest.max_loras:
        raise ConfigError(
            f"{option} is {slots}, this engine has {manifest.max_loras} slots; pass 1 to "
            f"{manifest.max_loras}, or build one with --max-loras {slots}"
        )
    return StoreConfig(device_memory=slots * slot_nbytes(manifest))
