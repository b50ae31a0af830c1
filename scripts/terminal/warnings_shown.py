"""Forward the package's log warnings to the terminal."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Shown(logging.Handler):
    """Hands every message to a function, as one line, each once."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._show = show
        self._known: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().splitlines())
        if line not in self._known:
            self._known.add(line)
            self._show(line)


@contextmanager
def warnings_shown(show: Callable[[str], object]) -> Iterator[None]:
    """Hand the warnings of the log `trt_lora` to `show` while the block runs, each as one line."""
    handler, log = _Shown(show), logging.getLogger("trt_lora")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
