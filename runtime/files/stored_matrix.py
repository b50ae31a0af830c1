"""The weight or bias of a linear as it lies in an engine's file of weights, read in blocks."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trt_lora.runtime.memory.dtypes import Array, storage_dtype

_BLOCK = 1 << 24  # bytes in memory at a time

Block = tuple[slice, slice, Array]  # rows and columns of W [k, n], and its values there


def bias_of(path: str) -> str:
    """Return the name of a linear's bias, a matrix of one row, from the linear's path."""
    return f"{path}.bias"


@dataclass(frozen=True)
class StoredMatrix:
    """Floats, row by row."""

    offset: int  # bytes before the first
    dtype: str
    k: int
    n: int
    is_turned: bool = False  # whether rows are those of [n, k]
    values: str = ""  # all bytes in hexadecimal digits, of what is too small to lie in the file

    def blocks(self, file: Path) -> Iterator[Block]:
        """Yield all of W [k, n], block by block.

        Raises:
            OSError: the file cannot be read.
            ValueError: it ends before the last row.
        """
        rows, width = (self.n, self.k) if self.is_turned else (self.k, self.n)
        dtype, every = storage_dtype(self.dtype), slice(None)
        step = max(_BLOCK // (width * dtype.itemsize), 1)
        with io.BytesIO(bytes.fromhex(self.values)) if self.values else file.open("rb") as opened:
            opened.seek(self.offset)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                data = opened.read((stop - start) * width * dtype.itemsize)
                values = np.frombuffer(data, dtype).reshape(stop - start, width)
                own = slice(start, stop)
                yield (every, own, values.T) if self.is_turned else (own, every, values)
