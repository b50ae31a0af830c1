"""Time a call in seconds."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Seconds(NamedTuple):
    """Wall time, and CPU time of all processors, which a busy machine lengthens less."""

    wall: float
    processors: float


def seconds_of(run: Callable[[], object]) -> Seconds:
    """Call once; freeing the result is not part of it."""
    clock, processors = time.perf_counter(), time.process_time()
    result = run()
    taken = Seconds(time.perf_counter() - clock, time.process_time() - processors)
    del result
    return taken


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> list[tuple[float, float]]:
    """Return the seconds of each, in turns after one round of warming up [rounds]."""
    return [(ours(), theirs()) for _ in range(rounds + 1)][1:]


def medians_in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Return the median seconds of each; see `in_turns`."""
    pairs = in_turns(ours, theirs, rounds)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
