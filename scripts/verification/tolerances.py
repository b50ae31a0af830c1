"""How far a result may be off: what rounding explains by dtype, or what a user says."""

import math
from dataclasses import dataclass

from trt_lora.plugins.errors import ConfigError


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains: of a logit, absolutely; of a site's delta, relative to its norm."""

    logit: float
    delta: float


TOLERANCES = {
    "float32": Tolerance(1e-3, 1e-6),
    "float16": Tolerance(0.5, 2e-3),
    "bfloat16": Tolerance(2.0, 2e-2),
}


def chosen_tolerance(given: float | None, default: float) -> float:
    """Return the value of `--tolerance`, or the default without one.

    Raises:
        ConfigError: it is one that everything, or nothing, would meet.
    """
    if given is None:
        return default
    if not (math.isfinite(given) and given >= 0):
        raise ConfigError(f"--tolerance is {given}, expected a finite number from 0")
    return given
