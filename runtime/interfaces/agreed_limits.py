"""Limits that a config states and an engine has: both say the same, or the config is refused."""

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.runtime.store.slot_stacks import slot_nbytes
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


def check_slots(option: str, slots: int | None, adapters: AdapterStore) -> None:
    """Refuse another number of adapters on the device than there are slots.

    Raises:
        ConfigError: it is another.
    """
    if slots not in (None, adapters.stacks.slots):
        raise ConfigError(
            f"{option} is {slots}, these adapters have {adapters.stacks.slots} slots; make them by "
            f"AdapterStore(engine, config.cache_config(engine.manifest)), or build an engine with "
            f"--max-loras {slots}"
        )


def memory_of_slots(option: str, slots: int | None, manifest: Manifest) -> int | None:
    """Return the device memory in bytes that has room for so many slots; None for all.

    Raises:
        ConfigError: the engine has fewer.
    """
    if slots is None:
        return None
    if not 1 <= slots <= manifest.max_loras:
        raise ConfigError(
            f"{option} is {slots}, this engine has {manifest.max_loras} slots; pass 1 to "
            f"{manifest.max_loras}, or build one with --max-loras {slots}"
        )
    return slots * slot_nbytes(manifest)


def cache_of_slots(option: str, slots: int | None, manifest: Manifest) -> StoreConfig:
    """Return the cache config of so many slots and a host without limit.

    Raises:
        ConfigError: the engine has fewer.
    """
    return StoreConfig(device_memory=memory_of_slots(option, slots, manifest))
