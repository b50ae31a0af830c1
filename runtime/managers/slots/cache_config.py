"""Limits of the adapter cache, in bytes or as shares of free memory."""

from collections.abc import Callable
from dataclasses import dataclass

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.managers.slots.slot_stacks import slot_nbytes
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.host import Memory


@dataclass(frozen=True)
class CacheConfig:
    """How much memory adapters may take: a number of bytes (int), or a share of what is free.

    A share is a float above 0 and at most 1, of the memory that is free when the cache is made.
    """

    host_memory: int | float | None = None  # adapters on the host; None: no limit
    device_memory: int | float | None = None  # slots; None: all that the engine was built for

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is no number of bytes and no share.
        """
        for name in ("host_memory", "device_memory"):
            _check(name, getattr(self, name))


def bytes_of(limit: float | None, free: Callable[[], int]) -> int | None:
    """Return a limit in bytes; `free` says how many are free now, and None is no limit."""
    return int(limit * free()) if isinstance(limit, float) else limit


def slots_within(config: CacheConfig, manifest: Manifest, memory: Memory) -> int:
    """Return how many slots the device's share has room for, at most the engine's.

    Raises:
        ConfigError: there is room for none, or the engine has none.
    """
    nbytes = slot_nbytes(manifest)
    limit = bytes_of(config.device_memory, memory.free_bytes)
    slots = manifest.max_loras if limit is None else min(limit // nbytes, manifest.max_loras)
    if slots < 1:
        raise ConfigError(
            f"device_memory is {config.device_memory}, {limit:,} bytes; one slot of this engine "
            f"takes {nbytes:,}"
        )
    return slots


def _check(name: str, limit: object) -> None:
    if limit is None:
        return
    is_bytes = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    if not is_bytes and not (isinstance(limit, float) and 0 < limit <= 1):
        raise ConfigError(
            f"{name} is {limit!r}; give a number of bytes such as 2 * 2**30, a share of free "
            "memory such as 0.5, or None"
        )
