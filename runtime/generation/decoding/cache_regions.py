"""Where each cache input lies in one allocation, and the places of a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import gcd

from trt_lora.plugins.contract.step import CACHE
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.host import ALIGNMENT, Blocks, Memory
from trt_lora.runtime.memory.tensor import HOST

# Tokens of prompts in a step: on a GPU, about as many as take it as long as a token of each row; on
# the host, where fewer cost more than they are worth, a piece of one prompt (see `StaticDecoder`).
_BUDGETS = {False: 512, True: 256}


@dataclass(frozen=True)
class Region:
    """One cache input: its rows lie one after another from `offset`."""

    binding: Binding
    offset: int  # bytes from the start of the allocation
    row_bytes: int

    def nbytes(self, rows: int) -> int:
        """Return the size of so many rows, up to where the next cache input may begin."""
        return -(-self.row_bytes * rows // ALIGNMENT) * ALIGNMENT


def cache_regions(manifest: Manifest, rows: int) -> Iterator[Region]:
    """Yield where each cache input of an engine lies, in their order."""
    offset = 0
    for binding in manifest.inputs:
        if binding.name.startswith(CACHE):
            row_bytes = storage_dtype(binding.dtype).itemsize
            for size in binding.shape[1:]:
                row_bytes *= int(size)
            region = Region(binding, offset, row_bytes)
            yield region
            offset += region.nbytes(rows)


def rows_within(manifest: Manifest, nbytes: int) -> int:
    """Return how many sequences a cache of so many bytes holds, as far as the engine takes them.

    Raises:
        ConfigError: not even one.
    """
    row = sum(region.row_bytes for region in cache_regions(manifest, 1))
    if nbytes < row:
        raise ConfigError(
            f"cache_bytes is {nbytes}, and one sequence of {manifest.max_seq_len} tokens takes "
            f"{row}; allow more, or build with a smaller --max-seq-len"
        )
    return min(nbytes // max(row, 1), manifest.max_batch_size)


def row_count(manifest: Manifest, rows: int | None, cache_bytes: int | None) -> int:
    """Return how many sequences run at a time, most.

    Args:
        manifest: of the engine.
        rows: the number itself; None is the engine's largest batch.
        cache_bytes: instead: as many as a cache of this size holds.

    Raises:
        ConfigError: both are given, or the engine does not take so many.
    """
    if cache_bytes is not None:
        if rows is not None:
            raise ConfigError("rows and cache_bytes both say how many sequences; pass one of them")
        rows = rows_within(manifest, cache_bytes)
    rows = manifest.max_batch_size if rows is None else rows
    if not 1 <= rows <= manifest.max_batch_size:
        raise ConfigError(
            f"rows is {rows}, expected a whole number from 1 to {manifest.max_batch_size}"
        )
    return rows


def prompt_budget(asked: int | None, memory: Memory) -> int:
    """Return how many tokens of prompts a step runs, most; by default what the device is good for.

    Raises:
        ConfigError: there are none.
    """
    budget = _BUDGETS[memory.device == HOST] if asked is None else asked
    if budget < 1:
        raise ConfigError(f"max_num_batched_tokens is {budget}, expected a whole number from 1 on")
    return budget


def check_alignment(regions: Sequence[Region], max_len: int) -> None:
    """Refuse rows that no engine on a GPU can be given the address of.

    Rows follow one another without a gap, and each is bound at its own address.

    Raises:
        ConfigError: a row's size is no multiple of the alignment.
    """
    for region in regions:
        if region.row_bytes % ALIGNMENT:
            step = ALIGNMENT // gcd(region.row_bytes // max_len, ALIGNMENT)
            raise ConfigError(
                f"a row of {region.binding.name} has {region.row_bytes} bytes, and TensorRT takes "
                f"addresses that are multiples of {ALIGNMENT}; run one sequence at a time, or "
                f"build with a --max-seq-len that is a multiple of {step}"
            )


def row_blocks(regions: Sequence[Region]) -> Iterator[tuple[Region, Blocks]]:
    """The places of one row: the first region of each size, and how many follow how far apart.

    Layers repeat, so that regions of one size are equally far apart, and a row is one copy, or one
    for the keys and one for the values. Where they are not, each is copied by itself.
    """
    by_size = sorted(regions, key=_row_bytes)  # stable: in the order of their offsets
    for nbytes, same in groupby(by_size, key=_row_bytes):
        group = list(same)
        strides = {after.offset - before.offset for before, after in pairwise(group)}
        if len(strides) == 1:
            yield group[0], Blocks(nbytes, len(group), *strides)
        else:
            yield from ((region, Blocks(nbytes)) for region in group)


def _row_bytes(region: Region) -> int:
    return region.row_bytes
