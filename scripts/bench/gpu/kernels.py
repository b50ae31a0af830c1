"""The LoRA kernels beside cuBLAS, empty kernels and the path model, a group at a time."""

import itertools
from collections.abc import Iterator, Sequence

import torch

from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.gpu import ceilings as gpu_ceilings
from trt_lora.scripts.bench.gpu.device import CudaDevice
from trt_lora.scripts.bench.gpu.group_calls import GroupCalls, GroupCell
from trt_lora.scripts.bench.gpu.path_model import GpuModel, call_us
from trt_lora.scripts.bench.gpu.row_mixes import MIXES
from trt_lora.scripts.bench.llama import LLAMA_3_8B, LayerShape, LinearShape
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import ROUNDS, Spread, alternate
from trt_lora.scripts.measuring.worker import WrongResultError

AGREES = 0.01  # the difference that rounding explains in a row
WARM_UP = 3  # rounds that bring the clock up
_GROUPS = ("gate_up", "qkv", "down", "o")
_ROWS = (1, 8, 32, 512)
_RANKS = (16, 64, 256, 8, 128, 32)
_MORE_ROWS = (2, 4, 16, 64, 128, 2048)
_MIXED_ROWS, _MIXED_RANKS = (8, 32, 64), (64, 16)
_LEAST_CALLS, _MOST_CALLS = 32, 512
_ITEM_BYTES = 2


def rows() -> Iterator[ResultRow]:
    """Measure every cell on the current GPU.

    Raises:
        WrongResultError: behind a row in which our kernels differ from float64.
    """
    with torch.no_grad():
        device = CudaDevice()
        gpu = GpuModel(device.chip, gpu_ceilings.measure(device)[0])
        for cell in cells():
            row = measure(device, cell, gpu)
            yield row
            check(row)


def check(row: ResultRow) -> None:
    """Refuse a row in which our kernels differ from float64.

    Raises:
        WrongResultError: they do; NaN differs.
    """
    worst = row.ratios["ours / float64, worst row"]
    if not (isinstance(worst, float) and worst <= AGREES):
        raise WrongResultError(f"{row.name}: the worst row differs by {worst}, allowed {AGREES}")


def cells() -> Iterator[GroupCell]:
    """Yield what matters most first: a deadline cuts the end."""
    for m, group in itertools.product(_ROWS, _GROUPS):
        yield GroupCell(group, m, _RANKS[0])
    for m, rank, name, group in itertools.product(_MIXED_ROWS, _MIXED_RANKS, MIXES, _GROUPS):
        yield GroupCell(group, m, rank, name)
    for m, group in itertools.product(_MORE_ROWS, _GROUPS):
        yield GroupCell(group, m, _RANKS[0])
    for rank, m, group in itertools.product(_RANKS[1:], _ROWS, _GROUPS):
        yield GroupCell(group, m, rank)


def measure(
    device: CudaDevice,
    cell: GroupCell,
    gpu: GpuModel,
    model: LayerShape = LLAMA_3_8B,
    rounds: int = ROUNDS,
) -> ResultRow:
    """Time one cell, and predict it from what the GPU was measured to reach.

    Ours, cuBLAS, and empty kernels in the same clusters; ours with one adapter where the rows have
    many; else, where there is such a thing, ours that begins early.
    """
    linears = model.groups[cell.group]
    calls = GroupCalls(device, cell, linears, _calls(device, cell, linears))
    worst = {name: calls.worst_row(method) for name, method in calls.methods.items()}
    replays = {
        name: device.capture(calls.run_of(call))
        for name, call in {**calls.methods, "empty": calls.empty}.items()
    }

    def sample(names: Sequence[str]) -> list[float]:
        return device.times_us([replays[name] for name in names])

    times = alternate(list(replays), sample, rounds, warm_up=WARM_UP)
    us = {name: times.median(name) / len(calls) for name in replays}
    launches = launches_of(calls.shape, device.chip)
    predicted = call_us(calls.shape, launches, gpu, slots=calls.slots)
    ratios: dict[str, Spread | float] = {
        f"{name} / ours": times.ratio(name, "ours") for name in replays if name != "ours"
    }
    return ResultRow(
        cell.name,
        {"m": cell.m, "rank": cell.rank, "calls": len(calls)},
        {f"{name}, us a call": value for name, value in us.items()}
        | {"ours without its launch, us": us["ours"] - us["empty"], "predicted, us": predicted},
        ratios
        | {"ours / predicted": us["ours"] / predicted}
        | {f"{name} / float64, worst row": value for name, value in worst.items()},
        {"nodes": {name: replay.nodes for name, replay in replays.items()}},
    )


def _calls(device: CudaDevice, cell: GroupCell, linears: Sequence[LinearShape]) -> int:
    """How many calls have adapters that do not stay in the level-2 cache until a replay."""
    one = _ITEM_BYTES * cell.rank * sum(linear.k + linear.n for linear in linears)
    return max(_LEAST_CALLS, min(_MOST_CALLS, -(-3 * device.l2_bytes // one)))
