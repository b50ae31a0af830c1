"""What goes wrong in callbacks of the LoRA plugin, for whoever let TensorRT call it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class PluginFailures:
    """The failures of all plugins of a flavour in this process.

    TensorRT reports none of them, and does not say for whom it calls a plugin. So one build or one
    run at a time lets it call them: what is noted meanwhile is that one's. A run waits for the
    build of an engine in another thread of its process.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # held while TensorRT may call plugins
        self._noted: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[list[str]]:
        """Let TensorRT call plugins in the block; yield what they note, also while it runs."""
        with self._lock:
            self._noted = noted = []  # without what calls noted that nobody looked after
            try:
                yield noted
            finally:
                self._noted = []  # what comes later is nobody's

    def note(self, message: str) -> None:
        """Add a failure, from any thread that TensorRT calls a plugin in."""
        self._noted.append(message)
