"""Kernel choice and grid sizes for a group of sites; pure arithmetic, no CUDA calls."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from trt_lora.plugins.contract.sites import MAX_RANK, MAX_SITES, MIN_RANK
from trt_lora.plugins.errors import ConfigError, TensorError
from trt_lora.plugins.kernels.constants import (
    CHUNK,
    CHUNKS,
    CLUSTER,
    COLUMN_TILE_VECTORS,
    DECODE_TILES,
    K_STEP,
    MMA_ROWS,
    PAD,
    PASS_BYTES,
    RANK_BLOCK,
    RANK_TILE,
    ROW_TILE,
    SLOT_DECODE_TILES,
    STAGES,
    THREADS,
    TILE_COLUMNS,
    TILE_ROWS,
    UNIT,
    VECTOR_BYTES,
)
from trt_lora.plugins.kernels.group_call import GroupShape

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
TILES = (1, 4, 8)  # rows of a CTA, in the kernels on CUDA cores
TILE_CTAS = 2  # on a multiprocessor, in those on tensor cores: one multiplies while one loads

_SUM_BYTES = 4
_HALF_BYTES = 2  # of an element on tensor cores
_WARPS = THREADS // 32
_SHARED_BYTES = 48 * 1024  # what every GPU grants without being asked for more

_CUDA_CORE_ROWS = 8  # up to here they keep up with mma of 16 rows
_UNITS_OF_A_CLUSTER = 4  # at least, or too many CTAs would repeat a shrink for nothing
_FUSED_COLUMNS = 128  # every cluster repeats the shrink, so it has to be small
_TURNS_ALONE = 4  # so long a CTA shrinks without a cluster; a pair is faster then

_TILE_PITCH = TILE_COLUMNS + PAD
_SHRINK_TILES_BYTES = (  # the stages of x and A
    STAGES * _HALF_BYTES * (TILE_ROWS * (K_STEP + PAD) + K_STEP * _TILE_PITCH)
)


def _block_bytes(rows: int) -> int:
    """Shared memory of what expand_tiles multiplies at once: t in two parts, and B."""
    return _HALF_BYTES * (2 * rows * (RANK_BLOCK + PAD) + RANK_BLOCK * _TILE_PITCH)


_EXPAND_TILES_BYTES = _SUM_BYTES * TILE_ROWS + _block_bytes(TILE_ROWS)  # a scale for each row
_FUSED_TILES_BYTES = (  # t, a part, a tile of sums and a scale for each row
    _SUM_BYTES * MMA_ROWS * (TILE_COLUMNS + 2 * _TILE_PITCH + 1) + _block_bytes(MMA_ROWS)
)

_LOADS = 1024  # of 16 bytes of B for a CTA: four for each thread, under way at once
_MOST_SPLITS = 8  # the expand reads each
_LEAST_SPLIT = 256  # rows of A for a CTA; for fewer it starts in vain
_MOST_CTAS = 256  # that k is split for, however many multiprocessors: bounds the workspace


class Chip(NamedTuple):
    """Compute capability and number of streaming multiprocessors of a GPU."""

    compute_capability: tuple[int, int]
    multiprocessors: int

    @property
    def version(self) -> str:
        """Its compute capability as people write it, such as 9.0."""
        return ".".join(map(str, self.compute_capability))

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
    splits: int  # `Group.splits`: parts of k whose sums the workspace keeps apart


def plan_launches(shape: GroupShape, chip: Chip, *, aligned: bool = True) -> tuple[Launch, ...]:
    """Return the launches of one call, in order, where all rows have one adapter.

    Args:
        shape: of the call.
        chip: the GPU.
        aligned: whether all addresses are multiples of VECTOR_BYTES. If not, the kernels look at
            each pointer and stride themselves.

    Raises:
        ConfigError: the group has no site or too many, the dtype is unknown, or the GPU too old.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    check_shape(shape)
    if chip.compute_capability < (8, 0):
        raise ConfigError(
            "the LoRA kernels need compute capability 8.0 or newer and this GPU has "
            f"{chip.version}; build the engine without the plugin"
        )
    if aligned and _is_decode(shape) and (chip.cluster > 1 or _turns(shape) <= _TURNS_ALONE):
        return (_decode(shape, chip),)
    if shape.m > _CUDA_CORE_ROWS and shape.dtype != "float32":
        # Every tile of 16 rows reads A and B again: more rows than one tile of the pair go there.
        if chip.cluster > 1 and shape.m <= TILE_ROWS and column_tiles(shape) == 1:
            return (_fused_tiles(shape, chip),)
        return _tile_pair(shape, chip)
    if chip.cluster > 1 and shape.m <= _CUDA_CORE_ROWS and shape.total_rank <= _FUSED_COLUMNS:
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
    rows = next(rows for rows in tiles if fused_bytes(shape, rows) <= _shared_room(shape))
    clusters = min(math.ceil(slices(shape) / chip.cluster), chip.multiprocessors // chip.cluster)
    grid = (chip.cluster * max(clusters, 1), math.ceil(shape.m / rows), 1)
    kernel, shared = f"fused_{shape.dtype}_{rows}", fused_bytes(shape, rows)
    return Launch(kernel, grid, THREADS, chip.cluster, shared, splits=1)


def workspace_bytes(largest: GroupShape) -> int:
    """Return the workspace, in bytes, that no call needs more of on any GPU.

    Holds for every call whose m and ranks do not exceed those of `largest`, whatever its k and n.

    Raises:
        ConfigError: the group has no site or too many, or the dtype is unknown.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    check_shape(largest)
    sums = largest.m * largest.total_rank  # of one split
    # More than one split only where splits x tiles <= _MOST_CTAS; a tile has so many sums at most.
    several = min(_MOST_SPLITS * sums, _MOST_CTAS * TILE_ROWS * TILE_COLUMNS)
    return _SUM_BYTES * max(sums, several)


def check_shape(shape: GroupShape) -> None:
    """Refuse a group that the kernels cannot compute.

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
    kernel, shared = f"shrink_{shape.dtype}_{rows}", _column_tile_bytes(shape, rows, parts=1)
    shrink = _shrink(kernel, shape, rows, chip, shared)
    row_bytes = _SUM_BYTES * shape.total_rank
    rows = _rows_of_a_tile(shape.m, most=_shared_room(shape) // row_bytes)
    grid = (math.ceil(shape.m / rows), min(slices(shape), 2 * chip.multiprocessors), 1)
    kernel, shared = f"expand_{shape.dtype}_{rows}", rows * row_bytes
    return shrink, Launch(kernel, grid, THREADS, 1, shared, shrink.splits)


def _tile_pair(shape: GroupShape, chip: Chip) -> tuple[Launch, Launch]:
    kernel = f"shrink_tiles_{shape.dtype}"
    shrink = _shrink(kernel, shape, TILE_ROWS, chip, _SHRINK_TILES_BYTES)
    grid = (math.ceil(shape.m / TILE_ROWS) * _tiles_of_b(shape), 1, 1)
    kernel = f"expand_tiles_{shape.dtype}"
    return shrink, Launch(kernel, grid, THREADS, 1, _EXPAND_TILES_BYTES, shrink.splits)


def _is_decode(shape: GroupShape) -> bool:
    """Whether all rows of x, B and the outputs are vectors, few, and every rank tile has a warp."""
    widths = (shape.k, *(site.n for site in shape.sites))
    return (
        shape.m <= ROW_TILE * DECODE_TILES[-1]
        and shape.dtype != "float32"
        and all(width * _HALF_BYTES % VECTOR_BYTES == 0 for width in widths)
        and shape.rank_tiles <= _WARPS
        and _decode_bytes(shape.rank_tiles, _row_tiles(shape)) <= _shared_room(shape)
    )


def _decode(shape: GroupShape, chip: Chip) -> Launch:
    """A launch on at least half of the multiprocessors, if there are columns for them.

    Every cluster repeats the shrink, so no more of them than give each warp a rank tile to add
    up or a unit of B, not both.
    """
    units = sum(math.ceil(site.n / UNIT) for site in shape.sites)
    ctas = max(
        math.ceil(units / max(1, _WARPS - shape.rank_tiles)), math.ceil(chip.multiprocessors / 2)
    )
    most = min(chip.multiprocessors // chip.cluster, math.ceil(units / _UNITS_OF_A_CLUSTER))
    clusters = max(1, min(math.ceil(ctas / chip.cluster), most))
    tiles = _row_tiles(shape)
    rows = tiles * ROW_TILE
    grid = (chip.cluster * clusters, math.ceil(shape.m / rows), 1)
    shared = _decode_bytes(shape.rank_tiles, tiles)
    kernel = f"decode_{shape.dtype}_{rows}"
    return Launch(kernel, grid, THREADS, chip.cluster, shared, splits=1)


def _turns(shape: GroupShape) -> int:
    """How often a CTA with all of k waits for what its warps load of A at once."""
    warps = _WARPS >> (shape.rank_tiles - 1).bit_length()  # of a rank tile
    return math.ceil(shape.k / (warps * CHUNKS * CHUNK))


def _decode_bytes(rank_tiles: int, tiles: int) -> int:
    """Shared memory of `decode` with so many row tiles: chunks; then sums, a part and t."""
    sums = ROW_TILE * RANK_TILE
    chunks = _WARPS * CHUNKS * CHUNK * RANK_TILE * _HALF_BYTES
    split_tile = 2 * _HALF_BYTES * sums + _SUM_BYTES * ROW_TILE
    tile_of_t = _SUM_BYTES * sums + split_tile
    return max(chunks, tiles * (_WARPS * _SUM_BYTES * sums + rank_tiles * tile_of_t))


def _row_tiles(shape: GroupShape) -> int:
    """Row tiles of a CTA of `decode`: those that take all rows, or the most that there are."""
    every = SLOT_DECODE_TILES if shape.stacks else DECODE_TILES
    return next((tiles for tiles in every if tiles * ROW_TILE >= shape.m), every[-1])


def _fused_tiles(shape: GroupShape, chip: Chip) -> Launch:
    """A launch that the GPU has room for at once: a cluster that waits shrinks when others end.

    No more clusters than share out B as evenly, for each repeats the shrink.
    """
    tiles = math.ceil(shape.m / MMA_ROWS)
    room = max(1, chip.multiprocessors // chip.cluster * TILE_CTAS // tiles)
    tiles_of_a_cta = math.ceil(_tiles_of_b(shape) / (chip.cluster * room))
    clusters = math.ceil(_tiles_of_b(shape) / (chip.cluster * tiles_of_a_cta))
    grid = (chip.cluster * clusters, tiles, 1)
    kernel = f"fused_tiles_{shape.dtype}"
    return Launch(kernel, grid, THREADS, chip.cluster, _FUSED_TILES_BYTES, splits=1)


def _shrink(kernel: str, shape: GroupShape, rows: int, chip: Chip, shared_bytes: int) -> Launch:
    """A launch with enough splits of k for every multiprocessor, if k is long enough."""
    ctas = math.ceil(shape.m / rows) * column_tiles(shape) * chip.cluster
    idle = min(chip.multiprocessors, _MOST_CTAS) // ctas
    longest = math.ceil(shape.k / (_LEAST_SPLIT * chip.cluster))
    splits = max(1, min(idle, _MOST_SPLITS, longest))
    return Launch(kernel, (ctas, splits, 1), THREADS, chip.cluster, shared_bytes, splits)


def slices(shape: GroupShape) -> int:
    """Return the number of CTAs that the loads of B can keep busy."""
    loads = sum(_vectors(site.n, shape.dtype) * site.rank for site in shape.sites)
    return math.ceil(loads / _LOADS)


def column_tiles(shape: GroupShape) -> int:
    """Return the number of column tiles that all A of a group are."""
    vectors = sum(_vectors(site.rank, shape.dtype) for site in shape.sites)
    return math.ceil(vectors / COLUMN_TILE_VECTORS)


def _tiles_of_b(shape: GroupShape) -> int:
    return sum(math.ceil(site.n / TILE_COLUMNS) for site in shape.sites)


def _vectors(columns: int, dtype: str) -> int:
    return math.ceil(columns * ITEM_BYTES[dtype] / VECTOR_BYTES)


def fused_bytes(shape: GroupShape, rows: int) -> int:
    """Return the shared memory, in bytes, of the fused kernel with so many rows a tile."""
    t = _SUM_BYTES * rows * shape.total_rank
    return t + _column_tile_bytes(shape, rows, parts=column_tiles(shape))


def _column_tile_bytes(shape: GroupShape, rows: int, *, parts: int) -> int:
    """Shared memory for the sums of each warp, and for `parts` sums of all warps."""
    pitch = COLUMN_TILE_VECTORS * VECTOR_BYTES // ITEM_BYTES[shape.dtype] + PAD
    return _SUM_BYTES * rows * pitch * (_WARPS + parts)


def _shared_room(shape: GroupShape) -> int:
    """Shared memory that a tile may take; with stacks a pass lies before it."""
    return _SHARED_BYTES - (PASS_BYTES if shape.stacks else 0)


def _rows_of_a_tile(m: int, most: int = _CUDA_CORE_ROWS) -> int:
    """The smallest of the tiles up to `most` that takes m rows, or else the largest."""
    allowed = [rows for rows in TILES if rows <= most]
    return next((rows for rows in allowed if rows >= m), allowed[-1])
