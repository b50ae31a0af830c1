"""Ratios within one run: alternating order, medians, and the spread between rounds."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 20  # of each version; even, so that every order comes as often as its reverse

# Runs versions one after another and returns the microseconds of each, in the order given.
Sample = Callable[[Sequence[str]], Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """A median over rounds, and the quarters that lie below and above."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Times:
    """Times of every version in one unit, such as microseconds; one for each round."""

    samples: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Return the median of a version."""
        return statistics.median(self.samples[name])

    def ratio(self, name: str, base: str) -> Spread:
        """Return the spread of `name / base`, round by round."""
        return _spread(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        """Return `name / base` of every round."""
        return [a / b for a, b in zip(self.samples[name], self.samples[base], strict=True)]


def orders(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """Yield the order of every round: each is the reverse of the one before."""
    return (names if index % 2 == 0 else names[::-1] for index in range(rounds))


def alternate(
    names: Sequence[str], sample: Sample, rounds: int = ROUNDS, *, warm_up: int = 0
) -> Times:
    """Time versions against each other: A B C, C B A, A B C, ...

    A drift of the clock then meets both of a pair alike, and so does what the version before leaves
    in the caches. The rounds that warm up come first and do not count.
    """
    for _ in range(warm_up):
        sample(names)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for order in orders(names, rounds):
        for name, us in zip(order, sample(order), strict=True):
            samples[name].append(us)
    return Times(samples)


def _spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
