"""Weights that ONNX Runtime reads where they lie, in a mapped file: changed ones are an error.

A file that is written to changes the answers of every engine that has it open, and one that is cut
short ends the process at the next page that is missing.
"""

import os
from pathlib import Path

from trt_lora.plugins.errors import BackendError


class MappedWeights:
    """The file as it was when it was opened; a rename or an unlink does it no harm."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            BackendError: it cannot be opened.
        """
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BackendError(f"{path} cannot be opened: {error.strerror}") from error
        self._opened = self._state()

    def check(self) -> None:
        """Refuse a run on other weights; takes a microsecond.

        Raises:
            BackendError: the file was written to since.
        """
        if self._state() != self._opened:
            raise BackendError(
                f"{self._path} was written to while the engine is open: its answers would be other "
                "ones; open the engine again, and replace engines by renaming a directory"
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _state(self) -> tuple[int, int]:
        now = os.fstat(self._descriptor)
        return now.st_size, now.st_mtime_ns
