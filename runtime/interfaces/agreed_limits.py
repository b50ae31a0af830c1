"""Limits that a config states and an engine has: both say the same, or the config is refused."""

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.managers.slots.cache_config import CacheConfig
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.managers.slots.slot_stacks import slot_nbytes
from trt_lora.runtime.manifest import Manifest


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


def check_slots(option: str, slots: int | None, adapters: SlotAdapters) -> None:
    """Refuse another number of adapters on the device than there are slots.

    Raises:
        ConfigError: it is another.
    """
    if slots not in (None, adapters.stacks.slots):
        raise ConfigError(
            f"{option} is {slots}, these adapters have {adapters.stacks.slots} slots; make them by "
            f"SlotAdapters(engine, config.cache_config(engine.manifest)), or build an engine with "
            f"--max-loras {slots}"
        )


def cache_of_slots(option: str, slots: int | None, manifest: Manifest) -> CacheConfig:
    """Return the cache config of so many slots and a host without limit; None is all slots.

    Raises:
        ConfigError: the engine has fewer.
    """
    if slots is None:
        return CacheConfig()
    if not 1 <= slots <= manifest.max_loras:
        raise ConfigError(
            f"{option} is {slots}, this engine has {manifest.max_loras} slots; pass 1 to "
            f"{manifest.max_loras}, or build one with --max-loras {slots}"
        )
    return CacheConfig(device_memory=slots * slot_nbytes(manifest))
