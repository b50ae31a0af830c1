"""Which kernels compute a group, and on what grids: arithmetic alone, no CUDA."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from trt_lora.plugins.contract import MAX_RANK, MAX_SITES, MIN_RANK
from trt_lora.plugins.errors import ConfigError, TensorError
from trt_lora.plugins.group import GroupShape

BLOCK = 256  # threads of every kernel
CLUSTER = 8  # CTAs that share a shrink: the most that every GPU with clusters can place
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
TILES = (1, 4, 8)  # rows of a CTA, in the kernels on CUDA cores
TILE_CTAS = 2  # on a multiprocessor, in those on tensor cores: one multiplies while one loads

_SUM_BYTES = 4
_WARPS = BLOCK // 32
_STRIP_BYTES = 16  # of a row of A or B: one load
_CHUNK = 16  # strips of A that a CTA shrinks at once
_PAD = 8  # columns behind each row of sums in shared memory
_SHARED_BYTES = 48 * 1024  # what every GPU grants without being asked for more

_FEW_ROWS = 8  # up to here CUDA cores keep up with tensor cores, which multiply 16 rows at once
_FUSED_COLUMNS = 128  # every cluster repeats the shrink, so it has to be small
# Every tile of 16 rows reads A and B again, so more rows than one tile of the pair go there.
_FUSED_TILE_ROWS = 64

_TILE_ROWS = 64  # of a CTA, in the kernels on tensor cores
_TILE_COLUMNS = 128  # of A in shrink_tiles, of B in expand_tiles
_SHRINK_TILES_BYTES = 3 * 2 * (_TILE_ROWS * (32 + _PAD) + 32 * (_TILE_COLUMNS + _PAD))
_EXPAND_TILES_BYTES = 4 * _TILE_ROWS + 2 * (
    2 * _TILE_ROWS * (64 + _PAD) + 64 * (_TILE_COLUMNS + _PAD)
)

_FEW_TILE_ROWS = 16  # of a CTA, in fused_tiles
_FUSED_TILES_BYTES = (  # t, a part and a tile of sums, then a block as in expand_tiles
    _SUM_BYTES * _FEW_TILE_ROWS * (_TILE_COLUMNS + 2 * (_TILE_COLUMNS + _PAD) + 1)
    + 2 * (2 * _FEW_TILE_ROWS * (64 + _PAD) + 64 * (_TILE_COLUMNS + _PAD))
)

_LOADS = 1024  # of 16 bytes of B for a CTA: four for each thread, under way at once
_MOST_SPLITS = 8  # the expand reads each
_LEAST_SPLIT = 256  # rows of A for a CTA; for fewer it starts in vain
_MOST_CTAS = 256  # that k is split for, however many multiprocessors: bounds the workspace


class Chip(NamedTuple):
    """What of a GPU decides the launches."""

    compute_capability: tuple[int, int]
    multiprocessors: int

    @property
    def cluster(self) -> int:
        """CTAs that share a shrink; before compute capability 9.0 there are no clusters."""
        return CLUSTER if self.compute_capability >= (9, 0) else 1


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a call."""

    kernel: str  # its name
    grid: tuple[int, int, int]  # CTAs
    block: int  # threads of a CTA
    cluster: int  # CTAs of a cluster, along the grid's first axis; the kernel asks for them itself
    shared_bytes: int  # dynamic shared memory of a CTA
    splits: int  # parts of k whose sums the workspace keeps apart: `Group.splits`


def plan_launches(shape: GroupShape, chip: Chip) -> tuple[Launch, ...]:
    """Return the launches of one call, in order.

    Alignment is no part of it: the kernels look at each pointer and stride themselves.

    Raises:
        ConfigError: the group has no site or too many, the dtype is unknown, or the GPU too old.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    check_shape(shape)
    if chip.compute_capability < (8, 0):
        version = ".".join(map(str, chip.compute_capability))
        raise ConfigError(
            f"the LoRA kernels need compute capability 8.0 or newer and this GPU has {version}; "
            "build the engine without the plugin"
        )
    if shape.m > _FEW_ROWS and shape.dtype != "float32":
        if chip.cluster > 1 and shape.m <= _FUSED_TILE_ROWS and _chunks(shape) == 1:
            return (_fused_tiles(shape, chip),)
        return _tile_pair(shape, chip)
    if chip.cluster > 1 and shape.m <= _FEW_ROWS and shape.columns <= _FUSED_COLUMNS:
        return (fused_launch(shape, chip),)
    return _pair(shape, chip)


def fused_launch(shape: GroupShape, chip: Chip) -> Launch:
    """Return the launch of the one kernel that does it all, right for every shape.

    Raises:
        ConfigError: the group has no site or too many, or the dtype is unknown.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    check_shape(shape)
    tiles = (_rows_of_a_tile(shape.m), *reversed(TILES))
    rows = next(rows for rows in tiles if fused_bytes(shape, rows) <= _SHARED_BYTES)
    clusters = min(math.ceil(slices(shape) / chip.cluster), chip.multiprocessors // chip.cluster)
    grid = (chip.cluster * max(clusters, 1), math.ceil(shape.m / rows), 1)
    kernel, shared = f"fused_{shape.dtype}_{rows}", fused_bytes(shape, rows)
    return Launch(kernel, grid, BLOCK, chip.cluster, shared, splits=1)


def workspace_bytes(largest: GroupShape) -> int:
    """Return the workspace, in bytes, that no call needs more of on any GPU.

    Holds for every call whose m and ranks do not exceed those of `largest`, whatever its k and n.

    Raises:
        ConfigError: the group has no site or too many, or the dtype is unknown.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    check_shape(largest)
    sums = largest.m * largest.columns  # of one split
    # More than one split only where splits x tiles <= _MOST_CTAS; a tile has so many sums at most.
    several = min(_MOST_SPLITS * sums, _MOST_CTAS * _TILE_ROWS * _TILE_COLUMNS)
    return _SUM_BYTES * max(sums, several)


def check_shape(shape: GroupShape) -> None:
    """Raise unless the kernels can compute the group.

    Raises:
        ConfigError: the group has no site or too many, or the dtype is unknown.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    if shape.dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {shape.dtype!r} is unknown; choose from: {', '.join(ITEM_BYTES)}")
    if not 1 <= len(shape.sites) <= MAX_SITES:
        raise ConfigError(
            f"a group has {len(shape.sites)} sites, and 1 to {MAX_SITES} share a launch; "
            "make several groups of them"
        )
    for name, size in (("m", shape.m), ("k", shape.k), *(("n", site.n) for site in shape.sites)):
        if size < 1:
            raise TensorError(f"{name} is {size}: there is nothing to launch; skip the call")
    for site in shape.sites:
        if not MIN_RANK <= site.rank <= MAX_RANK:
            raise TensorError(
                f"a rank is {site.rank}, and {MIN_RANK} to {MAX_RANK} can be computed; "
                "for no adapter bind the rank-1 zero dummy"
            )


def _pair(shape: GroupShape, chip: Chip) -> tuple[Launch, Launch]:
    rows = _rows_of_a_tile(shape.m)
    kernel, shared = f"shrink_{shape.dtype}_{rows}", _chunk_bytes(shape, rows, parts=1)
    shrink = _shrink(kernel, shape, rows, chip, shared)
    row_bytes = _SUM_BYTES * shape.columns
    rows = _rows_of_a_tile(shape.m, most=_SHARED_BYTES // row_bytes)
    grid = (math.ceil(shape.m / rows), min(slices(shape), 2 * chip.multiprocessors), 1)
    kernel, shared = f"expand_{shape.dtype}_{rows}", rows * row_bytes
    return shrink, Launch(kernel, grid, BLOCK, 1, shared, shrink.splits)


def _tile_pair(shape: GroupShape, chip: Chip) -> tuple[Launch, Launch]:
    kernel = f"shrink_tiles_{shape.dtype}"
    shrink = _shrink(kernel, shape, _TILE_ROWS, chip, _SHRINK_TILES_BYTES)
    grid = (math.ceil(shape.m / _TILE_ROWS) * _tiles_of_b(shape), 1, 1)
    kernel = f"expand_tiles_{shape.dtype}"
    return shrink, Launch(kernel, grid, BLOCK, 1, _EXPAND_TILES_BYTES, shrink.splits)


def _fused_tiles(shape: GroupShape, chip: Chip) -> Launch:
    """A launch that the GPU has room for at once: a cluster that waits shrinks when others end.

    No more clusters than share out B as evenly, for each repeats the shrink.
    """
    tiles = math.ceil(shape.m / _FEW_TILE_ROWS)
    room = max(1, chip.multiprocessors // chip.cluster * TILE_CTAS // tiles)
    tiles_of_a_cta = math.ceil(_tiles_of_b(shape) / (chip.cluster * room))
    clusters = math.ceil(_tiles_of_b(shape) / (chip.cluster * tiles_of_a_cta))
    grid = (chip.cluster * clusters, tiles, 1)
    kernel = f"fused_tiles_{shape.dtype}"
    return Launch(kernel, grid, BLOCK, chip.cluster, _FUSED_TILES_BYTES, splits=1)


def _shrink(kernel: str, shape: GroupShape, rows: int, chip: Chip, shared_bytes: int) -> Launch:
    """A launch with enough splits of k for every multiprocessor, if k is long enough."""
    ctas = math.ceil(shape.m / rows) * _chunks(shape) * chip.cluster
    idle = min(chip.multiprocessors, _MOST_CTAS) // ctas
    longest = math.ceil(shape.k / (_LEAST_SPLIT * chip.cluster))
    splits = max(1, min(idle, _MOST_SPLITS, longest))
    return Launch(kernel, (ctas, splits, 1), BLOCK, chip.cluster, shared_bytes, splits)


def slices(shape: GroupShape) -> int:
    """Return the number of CTAs that the loads of B are enough for."""
    loads = sum(_strips(site.n, shape.dtype) * site.rank for site in shape.sites)
    return math.ceil(loads / _LOADS)


def _chunks(shape: GroupShape) -> int:
    return math.ceil(sum(_strips(site.rank, shape.dtype) for site in shape.sites) / _CHUNK)


def _tiles_of_b(shape: GroupShape) -> int:
    return sum(math.ceil(site.n / _TILE_COLUMNS) for site in shape.sites)


def _strips(columns: int, dtype: str) -> int:
    return math.ceil(columns * ITEM_BYTES[dtype] / _STRIP_BYTES)


def fused_bytes(shape: GroupShape, rows: int) -> int:
    """Return the shared memory, in bytes, of the fused kernel with so many rows a tile."""
    t = _SUM_BYTES * rows * shape.columns
    return t + _chunk_bytes(shape, rows, parts=_chunks(shape))


def _chunk_bytes(shape: GroupShape, rows: int, *, parts: int) -> int:
    """Shared memory for the sums of each warp, and for those of all warps in `parts` chunks."""
    pitch = _CHUNK * _STRIP_BYTES // ITEM_BYTES[shape.dtype] + _PAD
    return _SUM_BYTES * rows * pitch * (_WARPS + parts)


def _rows_of_a_tile(m: int, most: int = _FEW_ROWS) -> int:
    """The smallest of the tiles up to `most` that takes m rows, or else the largest."""
    allowed = [rows for rows in TILES if rows <= most]
    return next((rows for rows in allowed if rows >= m), allowed[-1])
