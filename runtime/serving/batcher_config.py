"""Options of the scheduling of requests with adapters."""

from dataclasses import dataclass

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import ConfigError


@dataclass(frozen=True)
class BatcherConfig:
    """How long a request is passed over, and how far a step looks ahead."""

    drain_after: int = 32  # steps that a request waits before a slot is emptied for it
    load_ahead: int = 4  # adapters that are read from disk before they have a slot, the oldest's
    look_ahead: int = 32  # adapters without a slot that a step looks at, the oldest's

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ConfigError: a number is too small.
        """
        check_fields(self)
        for name, least in (("drain_after", 0), ("load_ahead", 1), ("look_ahead", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} on")
