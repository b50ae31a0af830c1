"""Error collection for plugin callbacks, whose exceptions TensorRT does not report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from trt_lora.plugins.messages import listed


def summary(failures: Sequence[str]) -> str:
    """Return the first few as one line: what fails in a node often fails in hundreds."""
    return listed(list(dict.fromkeys(failures)), separator="; ", last="; ")


class PluginFailures:
    """The failures of all plugins of a flavour in this process.

    TensorRT reports none of them, and does not say for whom it calls a plugin. So one build or one
    run at a time lets it call them: what is noted meanwhile is that one's. A run waits for the
    build of an engine in another thread of its process, unless it is the launch of a CUDA graph.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # held while TensorRT may call plugins
        self._noted: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[list[str]]:
        """Let TensorRT call plugins in the block; yield what they note, also while it runs."""
        with self._lock:
            noted: list[str] = []
            self._noted = noted  # what was noted before is nobody's
            try:
                yield noted
            finally:
                self._noted = []

    def note(self, message: str) -> None:
        """Add a failure, from any thread that TensorRT calls a plugin in."""
        self._noted.append(message)
