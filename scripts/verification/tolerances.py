"""Tolerances by dtype, for every command that compares, and the option `--tolerance`."""

import math
from dataclasses import dataclass, replace

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import Manifest


@dataclass(frozen=True)
class Tolerance:
    """Rounding error to expect in one dtype; absolute where nothing else is said."""

    logit: float  # for `verify` and `compare`
    delta: float  # of a site's delta, relative to its norm
    # For `polygraphy run`: an element differs if it is beyond its atol and beyond rtol.
    atol: float
    logits_atol: float
    rtol: float


# Those of `polygraphy run` are three times and more the errors of a model of 30 layers; bfloat16 is
# scaled from float16.
TOLERANCES = {
    "float32": Tolerance(logit=1e-3, delta=1e-6, atol=2e-3, logits_atol=2e-3, rtol=1e-3),
    "float16": Tolerance(logit=0.5, delta=2e-3, atol=0.5, logits_atol=2.0, rtol=2e-2),
    "bfloat16": Tolerance(logit=2.0, delta=2e-2, atol=4.0, logits_atol=16.0, rtol=0.16),
}

# Of a logit where codes are multiplied by x in 8 bits; a model of 30 layers has half of it.
_FAST_LOGIT = 6.0


def tolerance_of(manifest: Manifest) -> Tolerance:
    """Return what to expect of an engine."""
    tolerance = TOLERANCES[manifest.dtype]
    is_fast = any(kind.level == "fast" for kind in manifest.weights.values())
    return replace(tolerance, logit=_FAST_LOGIT) if is_fast else tolerance


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
