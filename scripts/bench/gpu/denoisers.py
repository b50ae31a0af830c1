"""LoRA beside the linears of SDXL and Flux at 4,096 tokens, and behind 3x3 convolutions.

`nodes` of a row are the kernels of its calls; `behind / GEMM` is LoRA's share of a layer's time.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from trt_lora.scripts.bench.diffusion.shapes import DENOISERS
from trt_lora.scripts.bench.gpu import beside_gemm
from trt_lora.scripts.bench.gpu.device import CudaDevice
from trt_lora.scripts.bench.gpu.group_calls import GroupCalls, GroupCell
from trt_lora.scripts.bench.llama import LinearShape
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import ROUNDS, alternate

TOKENS, RANKS = 4096, (16, 64)
CONVOLVED = ((64, 320), (32, 640))  # sides and channels of SDXL's ResNet blocks
_TAPS = tuple(itertools.product(range(3), range(3)))


def rows() -> Iterator[ResultRow]:
    """Measure every cell on the current GPU."""
    with torch.no_grad():
        device = CudaDevice()
        for cell in cells():
            yield beside_gemm.measure(device, cell, DENOISERS)
        for (side, channels), rank in itertools.product(CONVOLVED, RANKS):
            yield measure(device, side, channels, rank)


def cells() -> Iterator[GroupCell]:
    """Yield every group of linears at both ranks."""
    for rank, group in itertools.product(RANKS, DENOISERS.groups):
        yield GroupCell(group, TOKENS, rank)


def measure(
    device: CudaDevice, side: int, channels: int, rank: int, rounds: int = ROUNDS
) -> ResultRow:
    """Time a 3x3 convolution, its nine slices of x side by side, and LoRA behind both.

    Args:
        device: where it runs.
        side: of the picture, in pixels.
        channels: of x and of y.
        rank: of LoRA.
        rounds: of each way.
    """
    linear = LinearShape("conv1", len(_TAPS) * channels, channels)
    calls = GroupCalls(device, GroupCell("conv1", side * side, rank), [linear], beside_gemm.CALLS)
    x = device.random(1, side + 2, side + 2, channels)  # padded, channels last
    weight = device.random(channels, channels, 3, 3).to(memory_format=torch.channels_last)

    def conv(index: int) -> None:
        del index
        torch.conv2d(x.permute(0, 3, 1, 2), weight)

    def gather(index: int) -> None:
        del index
        slices = [x[0, i : i + side, j : j + side] for i, j in _TAPS]
        torch.cat(slices, -1, out=calls.x.view(side, side, -1))

    def adapted(index: int) -> None:
        conv(index)
        gather(index)
        calls.ours(index)

    ways = {"conv": conv, "gather": gather, "conv and LoRA": adapted}
    replays = {name: device.capture(calls.run_of(way)) for name, way in ways.items()}

    def sample(names: Sequence[str]) -> list[float]:
        return device.times_us([replays[name] for name in names])

    times = alternate(list(replays), sample, rounds, warm_up=beside_gemm.WARM_UP)
    return ResultRow(
        f"conv 3x3 {channels} at {side} x {side}, r{rank}",
        {"m": side * side, "k": linear.k, "n": linear.n, "rank": rank, "calls": len(calls)},
        {f"{name}, us a call": times.median(name) / len(calls) for name in replays},
        {f"{name} / conv": times.ratio(name, "conv") for name in ("gather", "conv and LoRA")},
        {"nodes": {name: replay.nodes for name, replay in replays.items()}},
    )
