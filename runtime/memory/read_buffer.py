"""Reusable read buffer: a fresh allocation costs as much as the read."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array

Bytes = npt.NDArray[np.uint8]


class ReadBuffer:
    """Keeps the largest memory asked for; for one thread, and for one array at a time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        """Return `size` bytes, those of the call before among them."""
        if self._memory.size < size:
            self._memory = np.empty(0, np.uint8)  # let go first
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


class Reader(Protocol):
    """Reads an array."""

    def __call__(self, buffer: ReadBuffer | None = None) -> Array:
        """Return the array: in memory of its own, or, where there is a buffer, perhaps there."""
        ...
