"""Time a call in seconds."""

import time
from collections.abc import Callable


def seconds_of(run: Callable[[], object]) -> float:
    """Call once; freeing the result is not part of the wall time."""
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    del result
    return seconds
