"""Buckets of histograms: vLLM 0.33's bounds (vllm/v1/metrics/buckets.py), in seconds and tokens."""

from collections.abc import Sequence
from itertools import accumulate, count

FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ANSWERS = (1, 2, 5, 10, 20)  # to a prompt


def up_to(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50 and so on, as far as a number of tokens."""
    found: list[int] = []
    for exponent in count():
        for mantissa in (1, 2, 5):
            if (bound := mantissa * 10**exponent) > most:
                return found
            found.append(bound)
    raise AssertionError("there is always a larger one")


def cumulative(
    counts: Sequence[int], bounds: Sequence[float], wanted: Sequence[float]
) -> list[tuple[str, int]]:
    """Return how many values are at most each of some bounds, as Prometheus has them.

    Args:
        counts: values in each bucket, the last one without a bound.
        bounds: of those buckets.
        wanted: which of the bounds are told.
    """
    below = dict(zip(bounds, accumulate(counts), strict=False))
    return [*((str(float(bound)), below[bound]) for bound in wanted), ("+Inf", sum(counts))]
