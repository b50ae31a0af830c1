"""Microseconds of a call by its longest warp: launches, loads that wait, instructions and bytes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trt_lora.plugins.kernels.constants import (
    CHUNK,
    CHUNKS,
    COLUMN_TILE_VECTORS,
    K_STEP,
    RANK_TILE,
    ROW_TILE,
    TILE_COLUMNS,
    UNIT,
)
from trt_lora.plugins.kernels.group_call import GroupShape
from trt_lora.plugins.kernels.launch_plan import TILE_CTAS, Chip, Launch
from trt_lora.plugins.kernels.nvrtc import SLOTS

# Cycles: of a kernel's start and end, a load from memory and from the level-2 cache, a barrier of
# a cluster, an instruction of a warp, and in a batch a call's pass of one slot.
KERNEL_CYCLES = 950  # of its start and end
COUNTER_CYCLES = 900  # a fence, an atomic, and a look at what the others have counted
_MEMORY, _CACHE, _BARRIER, _ISSUE, _PASS = 650, 300, 250, 2, 400
_BYTES_A_CYCLE = 64  # from the level-2 cache to a multiprocessor
_WARPS, _VECTOR, _ITEM_BYTES = 8, 8, 2  # of a CTA; elements of 16 bits; bytes of one


@dataclass(frozen=True)
class Ceilings:
    """What a GPU reaches: given by its maker, or measured by the workload `ceilings`."""

    megahertz: float
    bytes_per_us: float  # read, or copied
    node_us: float = 1.0  # of a graph of empty kernels, one behind another


@dataclass(frozen=True)
class GpuModel:
    """A GPU by its name."""

    chip: Chip
    ceilings: Ceilings


GPUS: Mapping[str, GpuModel] = {  # nine tenths of the bandwidth that the maker names
    "A100": GpuModel(Chip((8, 0), 108), Ceilings(1410, 1.75e6)),
    "A10": GpuModel(Chip((8, 6), 72), Ceilings(1695, 0.54e6)),
    "RTX 3090": GpuModel(Chip((8, 6), 82), Ceilings(1695, 0.84e6)),
    "RTX 4090": GpuModel(Chip((8, 9), 128), Ceilings(2520, 0.91e6)),
    "L40S": GpuModel(Chip((8, 9), 142), Ceilings(2520, 0.78e6)),
    "H100": GpuModel(Chip((9, 0), 132), Ceilings(1755, 3.0e6)),
    "RTX 5090": GpuModel(Chip((12, 0), 170), Ceilings(2407, 1.6e6)),
}


def call_us(
    shape: GroupShape, launches: Sequence[Launch], gpu: GpuModel, *, slots: int = 1
) -> float:
    """Return the microseconds of a call in a graph, behind other nodes.

    Args:
        shape: of the call.
        launches: of the call, in order.
        gpu: that runs it.
        slots: that its rows take.
    """
    ceilings = gpu.ceilings
    cycles = sum(_cycles(shape, launch, gpu.chip, slots) for launch in launches)
    own_us = len(launches) * ceilings.node_us + cycles / ceilings.megahertz
    return own_us + bytes_us(shape, gpu, slots=slots)


def bytes_us(shape: GroupShape, gpu: GpuModel, *, slots: int = 1) -> float:
    """Return the microseconds of the bytes of A and B; nobody waits for what is written."""
    factors = sum((shape.k + site.n) * site.rank for site in shape.sites) * slots
    return _ITEM_BYTES * factors / gpu.ceilings.bytes_per_us


def _cycles(shape: GroupShape, launch: Launch, chip: Chip, slots: int) -> float:
    """Of one launch: the path of a CTA, as often as CTAs with a pass come one behind another."""
    family = launch.kernel.removeprefix(SLOTS).partition(f"_{shape.dtype}")[0]
    width, height, passes = launch.grid
    shares = family == "decode" and passes == 1  # its clusters, out among the slots
    turns = 1 if shares else math.ceil(slots / passes)
    busy = width * height * min(slots, passes)
    waves = max(busy / (TILE_CTAS * chip.multiprocessors), 1)
    if shares:
        of_slot = max(width // launch.cluster // slots, 1) * launch.cluster
        launch = replace(launch, grid=(of_slot, height, 1))
    path = _PATHS[family](shape, launch) + (_PASS if slots > 1 else 0)
    return KERNEL_CYCLES + path * waves * turns


def _decode(shape: GroupShape, launch: Launch) -> float:
    rows = int(launch.kernel.rpartition("_")[2])
    tiles, parts = rows // ROW_TILE, _WARPS // _power_of_two(shape.rank_tiles)
    k = shape.k / launch.cluster
    turns = math.ceil(k / (parts * CHUNK * CHUNKS))
    waits = turns * (_MEMORY + (_CACHE if tiles > 2 else 0))
    # Without a cluster all of A comes through one multiprocessor's port.
    alone = k * shape.rank_tiles * RANK_TILE * _ITEM_BYTES / _BYTES_A_CYCLE
    staged = alone if launch.cluster == 1 else 0
    units = sum(math.ceil(site.n / UNIT) for site in shape.sites)
    more = math.ceil(units / (_WARPS * launch.grid[0])) - 1  # units of a warp behind the first
    barrier = max(_BARRIER, _CACHE) if launch.cluster > 1 else _CACHE  # y comes meanwhile
    issued = 400 + 60 * turns + 100 * tiles * (1 + more)
    return waits + staged + barrier + more * _MEMORY + _ISSUE * issued


def _fused_tiles(shape: GroupShape, launch: Launch) -> float:
    vectors = max(_power_of_two(math.ceil(shape.total_rank / _VECTOR)), 4)
    steps = math.ceil(shape.k / launch.cluster / (K_STEP * COLUMN_TILE_VECTORS / vectors))
    tiles = math.ceil(_tiles_of_b(shape) / launch.grid[0])
    waits = math.ceil(steps / 2) * _MEMORY + 8 * _CACHE + tiles * 2 * _CACHE + _BARRIER
    return waits + _ISSUE * (400 + 60 * steps + 200 * tiles)


def _shrink(shape: GroupShape, launch: Launch) -> float:
    rows = int(launch.kernel.rpartition("_")[2])
    width = _power_of_two(math.ceil(shape.total_rank / _VECTOR))
    depth = _depth(rows)
    k = shape.k / (launch.splits * launch.cluster)
    rounds = math.ceil(k * width / (256 * depth))
    return rounds * _MEMORY + _ISSUE * (150 + rounds * depth * _of_vector(rows) + 48 * rows)


def _expand(shape: GroupShape, launch: Launch) -> float:
    rows = int(launch.kernel.rpartition("_")[2])
    vectors = sum(site.n for site in shape.sites) / _VECTOR / launch.grid[1]
    width = min(_power_of_two(max(math.ceil(vectors / _WARPS), 2)), 32)
    turns, depth = math.ceil(vectors / (_WARPS * width)), _depth(rows)
    ranks = max(site.rank for site in shape.sites)
    rounds = turns * math.ceil(ranks * width / (32 * depth))
    issued = 150 + 2 * rows * launch.splits + rounds * depth * _of_vector(rows) + turns * 48 * rows
    return math.ceil(launch.splits / 4) * _CACHE + rounds * _MEMORY + _ISSUE * issued


def _shrink_tiles(shape: GroupShape, launch: Launch) -> float:
    steps = math.ceil(shape.k / (launch.splits * launch.cluster) / K_STEP)
    return math.ceil(steps / 2) * _MEMORY + _ISSUE * (300 + 60 * steps)


def _expand_tiles(shape: GroupShape, launch: Launch) -> float:
    return math.ceil(launch.splits / 4) * _CACHE + _MEMORY + _ISSUE * 500


def _fused(shape: GroupShape, launch: Launch) -> float:
    slices = replace(launch, grid=(1, launch.grid[0], 1))
    return _shrink(shape, launch) + _BARRIER + _expand(shape, slices)


_PATHS: Mapping[str, Callable[[GroupShape, Launch], float]] = {
    "decode": _decode,
    "fused": _fused,
    "fused_tiles": _fused_tiles,
    "shrink": _shrink,
    "expand": _expand,
    "shrink_tiles": _shrink_tiles,
    "expand_tiles": _expand_tiles,
}


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _depth(rows: int) -> int:
    return 4 if rows > 4 else 8


def _of_vector(rows: int) -> int:
    """Instructions of one vector of A or B: it is widened, and multiplied by every row."""
    return 20 + 8 * rows


def _tiles_of_b(shape: GroupShape) -> int:
    return sum(math.ceil(site.n / TILE_COLUMNS) for site in shape.sites)
