"""Time a call in seconds."""

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
