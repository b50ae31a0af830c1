"""StoreConfig: how much memory the adapters of an engine may take."""

from collections.abc import Callable
from dataclasses import dataclass

from trt_lora.plugins.errors import ConfigError


@dataclass(frozen=True)
class StoreConfig:
    """Limits of an `AdapterStore`: a number of bytes (int), or a share of what is free (float).

    A share is above 0 and at most 1, of the memory that is free when the store is made.
    """

    # Adapters on the host, beside the slots of an engine for many; None: no limit.
    host_memory: int | float | None = None
    # On the engine's device: slots, all that the engine was built for by default; or, on an engine
    # for one adapter at a time, the adapters themselves, without a limit by default.
    device_memory: int | float | None = None

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


def _check(name: str, limit: object) -> None:
    if limit is None:
        return
    is_bytes = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    if not is_bytes and not (isinstance(limit, float) and 0 < limit <= 1):
        raise ConfigError(
            f"{name} is {limit!r}; give a number of bytes such as 2 * 2**30, a share of free "
            "memory such as 0.5, or None"
        )
