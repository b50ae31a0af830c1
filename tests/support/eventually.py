"""Wait for what comes true after a while, however slow the machine is."""

import time
from collections.abc import Callable

SECONDS = 60.0  # no machine is that slow
_PAUSE = 0.01  # seconds between two looks


def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> bool:
    """Return whether a condition comes true within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True
