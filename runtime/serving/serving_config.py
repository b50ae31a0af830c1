"""Options of serving: how long a request is passed over, and how far a step looks ahead."""

from dataclasses import dataclass

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import ConfigError

_LEAST = {"max_wait_steps": 0, "max_wait_s": 0, "preempt_after": 0}  # of the others 1


@dataclass(frozen=True)
class ServingConfig:
    """Bounds of the waits for a slot, and of the work that a step spends on those who wait."""

    max_wait_steps: int = 32  # that a request waits for a slot before an adapter is drained for it
    max_wait_s: float = 2.0  # seconds, after which the same is done
    preempt_after: int = 64  # steps of draining, after which rows of the drained adapter are taken
    prefetch_depth: int = 4  # adapters that are read from disk before they have a slot
    scan_limit: int = 32  # adapters without a slot that a step looks at

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ConfigError: a number is too small.
        """
        check_fields(self)
        for name, value in vars(self).items():
            if not value >= (least := _LEAST.get(name, 1)):
                raise ConfigError(f"{name} is {value!r}, expected a number from {least} on")
