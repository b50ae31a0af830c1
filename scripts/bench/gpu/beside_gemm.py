"""LoRA behind and beside its group's GEMM: on one stream, and on a second of the highest priority.

With rank 1, the zeros that stand for no adapter: what idle nodes cost.
"""

from collections.abc import Iterator, Sequence

import torch

from trt_lora.scripts.bench.diffusion.shapes import LinearGroups
from trt_lora.scripts.bench.gpu.device import CudaDevice
from trt_lora.scripts.bench.gpu.group_calls import GroupCalls, GroupCell
from trt_lora.scripts.bench.llama import LLAMA_3_8B, LayerShape
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import ROUNDS, alternate

CALLS, WARM_UP = 32, 3  # of a graph: as many as layers
IDLE_RANK = 1
_GROUPS = ("gate_up", "qkv", "down", "o")


def rows() -> Iterator[ResultRow]:
    """Measure every cell on the current GPU."""
    with torch.no_grad():
        device = CudaDevice()
        for cell in cells():
            yield measure(device, cell)


def cells() -> Iterator[GroupCell]:
    """Yield what matters most first: a deadline cuts the end."""
    for m, rank in ((1, 16), (8, 16), (1, IDLE_RANK), (8, IDLE_RANK), (32, 16)):
        for group in _GROUPS:
            yield GroupCell(group, m, rank)


def measure(
    device: CudaDevice,
    cell: GroupCell,
    model: LayerShape | LinearGroups = LLAMA_3_8B,
    rounds: int = ROUNDS,
) -> ResultRow:
    """Time one group's GEMM alone, with LoRA behind it, and with LoRA beside it."""
    linears = model.groups[cell.group]
    calls = GroupCalls(device, cell, linears, CALLS)
    x = device.random(cell.m, linears[0].k)
    n = sum(linear.n for linear in linears)
    # Three level-2 caches of weights, so that a product finds none of its own there.
    bytes_of_one = 2 * linears[0].k * n
    weights = [
        device.random(linears[0].k, n) for _ in range(1 + -(-3 * device.l2_bytes // bytes_of_one))
    ]
    out = device.empty(cell.m, n)

    def gemm(index: int) -> None:
        torch.mm(x, weights[index % len(weights)], out=out)

    def behind(index: int) -> None:
        gemm(index)
        calls.ours(index)

    def beside(index: int) -> None:
        device.beside(lambda: gemm(index), lambda: calls.ours(index))

    ways = {"GEMM": gemm, "behind": behind, "beside": beside}
    replays = {name: device.capture(calls.run_of(way)) for name, way in ways.items()}

    def sample(names: Sequence[str]) -> list[float]:
        return device.times_us([replays[name] for name in names])

    times = alternate(list(replays), sample, rounds, warm_up=WARM_UP)
    return ResultRow(
        cell.name if cell.rank > IDLE_RANK else f"{cell.group} m{cell.m} idle",
        {"m": cell.m, "rank": cell.rank, "calls": CALLS},
        {f"{name}, us a call": times.median(name) / CALLS for name in replays},
        {f"{name} / GEMM": times.ratio(name, "GEMM") for name in ("behind", "beside")},
        {"nodes": {name: replay.nodes for name, replay in replays.items()}},
    )
