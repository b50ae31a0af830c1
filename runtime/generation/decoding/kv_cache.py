"""A static KV cache: one allocation, and a table of which sequence has which row.

Rows in use lie at the front, so that a step of n sequences binds the first n rows. A row is what
its sequence has written up to its length; what lies behind is never looked at. Rows that are not in
use may keep a prefix that another sequence begins with.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import gcd, prod
from operator import attrgetter

import numpy as np

from trt_lora.plugins.contract.step import CACHE, CROSS
from trt_lora.plugins.errors import ConfigError, StateError, TensorError
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.host import ALIGNMENT, Blocks, Memory
from trt_lora.runtime.memory.tensor import HOST, Tensor

_CACHED_VIEWS = 64  # first row and number of rows, the pairs in use


@dataclass(frozen=True)
class Region:
    """One cache input: its rows lie one after another from `offset`."""

    binding: Binding
    offset: int  # bytes from the start of the allocation
    row_bytes: int

    @property
    def heads(self) -> int:
        """How many parts of a row follow one another, each with all tokens."""
        return int(self.binding.shape[1])

    @property
    def is_cross(self) -> bool:
        """Whether it holds what layers attend to of a source, which is written once."""
        return self.binding.name.startswith(CROSS)

    def nbytes(self, rows: int) -> int:
        """Return the size of so many rows, up to where the next cache input may begin."""
        return -(-self.row_bytes * rows // ALIGNMENT) * ALIGNMENT


def cache_regions(manifest: Manifest, rows: int) -> Iterator[Region]:
    """Yield where each cache input of an engine lies, in their order; the cross cache's too."""
    offset = 0
    for binding in manifest.inputs:
        if binding.name.startswith((CACHE, CROSS)):
            row_bytes = storage_dtype(binding.dtype).itemsize * prod(map(int, binding.shape[1:]))
            region = Region(binding, offset, row_bytes)
            yield region
            offset += region.nbytes(rows)


@dataclass(frozen=True)
class Prefix:
    """What a row keeps of a sequence that has ended."""

    tokens: tuple[int, ...]
    key: Hashable  # of adapter and salt: others never share it


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
        # Positions of its source, of an encoder-decoder: never none, which attention cannot weigh.
        self.source_lengths: Ids = np.ones(rows, np.int64)
        self._owners: list[Hashable] = []
        self.prefixes: dict[int, Prefix] = {}  # by row, the one that was kept first first
        self._memory = memory
        self._regions = tuple(cache_regions(manifest, rows))
        self._row_blocks = tuple(_row_blocks(self._regions))
        if memory.device != HOST and rows > 1:
            _check_alignment(self._regions)
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
        try:
            return self._owners.index(owner)
        except ValueError:
            message = f"{owner!r} has no row; admitted are: {self._owners}"
            raise StateError(message) from None

    def admit(self, owner: Hashable, source: int | None = None, common: int = 0) -> int:
        """Give a sequence the next row.

        Where that row keeps a prefix, the prefix moves to a free row, or to that of the prefix
        which was kept first and is lost.

        Args:
            owner: the sequence.
            source: a row whose first tokens are the sequence's too; a prefix is used up if all of
                it is.
            common: how many these are, the length of the new row.

        Raises:
            StateError: every row is in use, or the sequence has one.
        """
        if owner in self._owners:
            raise StateError(f"{owner!r} has a row already; release it first")
        row = len(self._owners)
        if row == self.rows:
            raise StateError(f"all {self.rows} rows are in use; release one first")
        is_used_up = source in self.prefixes and common == self.lengths[source]
        if row in self.prefixes and not (is_used_up and source == row):
            self._vacate(row, source)
        if source is not None and source != row:
            self.copy_row(source, row)
            if is_used_up:
                self._forget(source)
            elif source in self.prefixes:
                self.prefixes[source] = self.prefixes.pop(source)  # the last to be lost
        self.prefixes.pop(row, None)
        self.lengths[row] = common
        self._owners.append(owner)
        return row

    def release(self, owner: Hashable, *, clear: bool = False, keep: Prefix | None = None) -> None:
        """Free a sequence's row; the last row in use moves there.

        Args:
            owner: who has the row.
            clear: write zeros over it: what is masked still meets values that are no numbers.
            keep: what the row holds, to be kept if there is room for it beside the rows in use.

        Raises:
            StateError: it has none.
        """
        row, last = self.row_of(owner), len(self._owners) - 1
        if clear:
            self._clear(row)
        if keep is not None and row != last and (free := self._free_row()) is not None:
            self.copy_row(row, free)
            self._keep(free, keep)
        if row != last:
            self.copy_row(last, row)
            self._owners[row] = self._owners[last]
            if clear:
                self._clear(last)
        self._owners.pop()
        self.lengths[last] = 0
        if keep is not None and row == last:
            self._keep(last, keep)

    def clear(self) -> None:
        """Free every row, whatever a release that did not end has left, and write zeros over it.

        A run that was stopped may have left values that are no numbers.
        """
        for row in (*range(len(self._owners)), *self.prefixes):
            self._clear(row)
        self._owners.clear()
        self.prefixes.clear()
        self.lengths[:] = 0

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row with its length: a prefix that two sequences share, or a row that moves.

        An overlapping step may have written one token more, which belongs to the row when it is
        told. The cross cache goes along whole, as far as the source does.
        """
        tokens = min(int(self.lengths[source]) + 1, self.max_len)
        for first, blocks in self._row_blocks:
            head_bytes = first.row_bytes // first.heads
            count = int(self.source_lengths[source]) if first.is_cross else tokens
            token_bytes = head_bytes // int(first.binding.shape[2])
            filled = replace(blocks, nbytes=token_bytes * count)
            for offset in range(0, first.row_bytes, head_bytes):
                to, of = (self._pointer(first, row) + offset for row in (target, source))
                self._memory.copy(to, of, filled)
        self.lengths[target] = self.lengths[source]
        self.source_lengths[target] = self.source_lengths[source]

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
        kept = {row: len(prefix.tokens) for row, prefix in self.prefixes.items()}
        behind = {used + place: n for place, n in enumerate(self.lengths[used:].tolist()) if n}
        if behind != kept or self.lengths.min() < 0 or self.lengths.max() > self.max_len:
            raise StateError(
                f"rows have lengths {self.lengths.tolist()} of {self.max_len}, {used} are in use, "
                f"and others keep {kept} tokens"
            )

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

    def _keep(self, row: int, prefix: Prefix) -> None:
        """A run of more rows than it needs writes behind the end of each: there must be room."""
        tokens = prefix.tokens[: self.max_len - 1]
        if tokens:
            self.prefixes[row] = Prefix(tokens, prefix.key)
        self.lengths[row] = len(tokens)

    def _forget(self, row: int) -> None:
        del self.prefixes[row]
        self.lengths[row] = 0

    def _free_row(self) -> int | None:
        """The last row that is not in use and keeps nothing."""
        rows = range(self.rows - 1, len(self._owners) - 1, -1)
        return next((row for row in rows if row not in self.prefixes), None)

    def _vacate(self, row: int, source: int | None) -> None:
        """Move a prefix, so that its row can be used; `source` is forgotten last."""
        free = self._free_row()
        if free is None:
            free = next((kept for kept in self.prefixes if kept != source), row)
        if free != row:
            self.prefixes.pop(free, None)
            self.copy_row(row, free)
            self.prefixes = {free if at == row else at: p for at, p in self.prefixes.items()}
        self.prefixes.pop(row, None)
        self.lengths[row] = 0

    def _clear(self, row: int) -> None:
        for first, blocks in self._row_blocks:
            self._memory.clear(self._pointer(first, row), blocks)

    def _pointer(self, region: Region, row: int) -> int:
        return self._block.pointer + region.offset + row * region.row_bytes


def _check_alignment(regions: Sequence[Region]) -> None:
    """Refuse rows that no engine on a GPU can be given the address of.

    Rows follow one another without a gap, and each is bound at its own address.

    Raises:
        ConfigError: a row's size is no multiple of the alignment.
    """
    for region in regions:
        if region.row_bytes % ALIGNMENT:
            size = int(region.binding.shape[2])
            step = ALIGNMENT // gcd(region.row_bytes // size, ALIGNMENT)
            option = "--max-source-len" if region.is_cross else "--max-seq-len"
            raise ConfigError(
                f"a row of {region.binding.name} has {region.row_bytes} bytes, and TensorRT takes "
                f"addresses that are multiples of {ALIGNMENT}; run one sequence at a time, or "
                f"build with a {option} that is a multiple of {step}"
            )


def _row_blocks(regions: Sequence[Region]) -> Iterator[tuple[Region, Blocks]]:
    """The places of one row: the first region of each size, and how many follow how far apart.

    Layers repeat, so that regions of one size are equally far apart, and a head of a row is one
    copy, or one for the keys and one for the values. Where they are not, each is copied by itself.
    """
    size = attrgetter("row_bytes", "heads", "is_cross")
    in_order = sorted(regions, key=size)  # those of one size by their offsets
    for (nbytes, *_), same in groupby(in_order, key=size):
        group = list(same)
        strides = {after.offset - before.offset for before, after in pairwise(group)}
        if len(strides) == 1:
            yield group[0], Blocks(nbytes, len(group), *strides)
        else:
            yield from ((region, Blocks(nbytes)) for region in group)
