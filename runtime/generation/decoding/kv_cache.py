"""A static KV cache: one allocation, and a table of which sequence has which row.

Rows in use lie at the front, so that a step of n sequences binds the first n rows. A row is what
its sequence has written up to its length; what lies behind is never looked at.
"""

from collections.abc import Hashable, Mapping

import numpy as np

from trt_lora.plugins.errors import ConfigError, StateError, TensorError
from trt_lora.runtime.generation.decoding.cache_regions import (
    Region,
    cache_regions,
    check_alignment,
    row_blocks,
)
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import HOST, Tensor

_CACHED_VIEWS = 64  # first row and number of rows, the pairs in use


class KVCache:
    """Rows [kv_heads, max_len, dim] of every cache input of an engine."""

    def __init__(self, manifest: Manifest, memory: Memory, rows: int) -> None:
        """Allocate zeros for `rows` sequences of `manifest.max_seq_len` tokens.

        Raises:
            ConfigError: there are none, or more than the engine takes, or a GPU cannot be given the
                address of a row.
            BackendError: the device is out of memory.
        """
        if not 1 <= rows <= manifest.max_batch_size:
            raise ConfigError(
                f"{rows} sequences do not fit this engine's batch of {manifest.max_batch_size}; "
                "split them, or build with a larger --max-batch-size"
            )
        self.max_len, self.rows = manifest.max_seq_len, rows
        self.lengths: Ids = np.zeros(rows, np.int64)  # tokens in each row
        self._owners: list[Hashable] = []
        self._memory = memory
        self._regions = tuple(cache_regions(manifest, rows))
        self._row_blocks = tuple(row_blocks(self._regions))
        if memory.device != HOST and rows > 1:
            check_alignment(self._regions, self.max_len)
        self.nbytes = sum(region.nbytes(rows) for region in self._regions)
        self._block = memory.zeros(self.nbytes, sparse=True)
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}

    @property
    def owners(self) -> tuple[Hashable, ...]:
        """Who has each row in use, from the first."""
        return tuple(self._owners)

    def row_of(self, owner: Hashable) -> int:
        """Return the row of a sequence.

        Raises:
            StateError: it has none.
        """
        if owner not in self._owners:
            raise StateError(f"{owner!r} has no row; admitted are: {self._owners}")
        return self._owners.index(owner)

    def admit(self, owner: Hashable) -> int:
        """Give a sequence the next free row, with length 0.

        Raises:
            StateError: every row is in use, or the sequence has one.
        """
        if owner in self._owners:
            raise StateError(f"{owner!r} has a row already; release it first")
        if len(self._owners) == self.rows:
            raise StateError(f"all {self.rows} rows are in use; release one first")
        self._owners.append(owner)
        self.lengths[len(self._owners) - 1] = 0
        return len(self._owners) - 1

    def release(self, owner: Hashable, *, clear: bool = False) -> None:
        """Free a sequence's row; the last row in use moves there.

        Args:
            owner: who has the row.
            clear: write zeros over it: what is masked still meets values that are no numbers.

        Raises:
            StateError: it has none.
        """
        row, last = self.row_of(owner), len(self._owners) - 1
        if clear:
            self._clear(row)
        if row != last:
            self.copy_row(last, row)
            self._owners[row] = self._owners[last]
            if clear:
                self._clear(last)
        self._owners.pop()
        self.lengths[last] = 0

    def clear(self) -> None:
        """Free every row, whatever a release that did not end has left, and write zeros over it.

        A run that was stopped may have left values that are no numbers.
        """
        for row in range(len(self._owners)):
            self._clear(row)
        self._owners.clear()
        self.lengths[:] = 0

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row with its length: a prefix that two sequences share, or a row that moves."""
        for first, blocks in self._row_blocks:
            to, of = (self._pointer(first, row) for row in (target, source))
            self._memory.copy(to, of, blocks)
        self.lengths[target] = self.lengths[source]

    def check_room(self, first: int, tokens: Ids) -> None:
        """Refuse to write beyond the end of a row.

        TensorRT checks nothing: it would write into the next one.

        Args:
            first: the first row.
            tokens: how many are written to each row from there [rows].

        Raises:
            TensorError: a row has no room for them.
        """
        wanted = self.lengths[first : first + len(tokens)] + tokens
        if wanted.max(initial=0) > self.max_len:
            raise TensorError(
                f"{wanted.max()} tokens are more than this engine's {self.max_len}; "
                "shorten the prompt, or build with a larger --max-seq-len"
            )

    def check_integrity(self) -> None:
        """Raise StateError if the table contradicts itself."""
        used = len(self._owners)
        if len(set(self._owners)) != used or used > self.rows:
            raise StateError(f"rows of {self.rows} are owned by {self._owners}")
        if self.lengths[used:].any() or self.lengths.min() < 0 or self.lengths.max() > self.max_len:
            raise StateError(f"rows have lengths {self.lengths.tolist()} of {self.max_len}")

    def views(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Every cache input over rows [first, first + count); the same objects at every call."""
        if (first, count) not in self._views:
            if len(self._views) == _CACHED_VIEWS:
                del self._views[next(iter(self._views))]
            self._views[first, count] = self._new_views(first, count)
        return self._views[first, count]

    def _new_views(self, first: int, count: int) -> dict[str, Tensor]:
        return {
            region.binding.name: Tensor(
                self._pointer(region, first),
                (count, *map(int, region.binding.shape[1:])),
                region.binding.dtype,
                self._block.device,
                self._block,
            )
            for region in self._regions
        }

    def _clear(self, row: int) -> None:
        for first, blocks in self._row_blocks:
            self._memory.clear(self._pointer(first, row), blocks)

    def _pointer(self, region: Region, row: int) -> int:
        return self._block.pointer + region.offset + row * region.row_bytes
