"""The benchmark's device on a CPU: torch, and our kernels by emulation, at tiny sizes."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from kernels import emulator

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.launcher import group_of
from trt_lora.plugins.kernels.nvrtc import SLOT_KERNELS
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.gpu.device import Replay
from trt_lora.scripts.bench.gpu.elementwise_kernels import Tensors
from trt_lora.scripts.bench.gpu.model_shapes import ModelShape

H200 = Chip((9, 0), 132)
TINY = ModelShape(hidden=64, keys=16, inner=128, vocabulary=96, layers=2)
ANYWHERE = emulator.Range(1, 2**62, 1)


@dataclass
class EmulatedKernels:
    """The kernels themselves, compiled for this CPU; it may read and write everywhere."""

    chip: Chip = H200
    shapes: set[GroupShape] = field(default_factory=set)  # of all calls

    def launch(self, shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
        """Run the call now."""
        self.shapes.add(shape)
        for launch in launches_of(shape, self.chip, aligned=buffers.aligned):
            group = group_of(shape, buffers, launch.splits)
            library = emulator.load(has_slots=launch.kernel in SLOT_KERNELS)
            emulator.emulate(library, launch, group, [ANYWHERE])


class TorchElementwiseKernels:
    """What the kernels between the products compute, by torch."""

    def __init__(self) -> None:
        self.nodes = 0

    def rms_norm(
        self,
        residual: torch.Tensor,
        product: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the norm."""
        if product is not None:
            residual.copy_(residual.float() + product.float())
        values = residual.float()
        scale = torch.rsqrt(values.pow(2).mean(dim=1, keepdim=True) + 1e-5)
        return out.copy_(values * scale * weight.float())

    def split(self, y: Tensors, deltas: Tensors, outs: Tensors) -> Tensors:
        """Write the sums."""
        for index, (each, out) in enumerate(zip(y, outs, strict=True)):
            out.copy_(each.float() + deltas[index].float() if deltas else each)
        return outs

    def gated(self, y: Tensors, deltas: Tensors, out: torch.Tensor) -> torch.Tensor:
        """Write SiLU(gate) * up."""
        gate, up = (each.float() for each in y)
        if deltas:
            gate, up = gate + deltas[0].float(), up + deltas[1].float()
        return out.copy_(torch.nn.functional.silu(gate) * up)

    def nothing(self, *, clusters: bool = False) -> None:
        """Count."""
        self.nodes += 1


@dataclass(frozen=True)
class CpuReplay:
    """Work that is run again."""

    work: Callable[[], object]
    nodes: int | None = None

    def run(self) -> None:
        """Run it."""
        self.work()


class CpuDevice:
    """A device without streams: everything has happened when a call returns."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self.where = torch.device("cpu")
        self.kernels = EmulatedKernels()
        self.elementwise = TorchElementwiseKernels()
        self.order: list[str] = []  # of forks and joins
        self.memory_bytes = 1 << 40

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed values."""
        return (torch.randn(shape) * scale).to(self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return NaNs."""
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype)

    def stream(self) -> int:
        """Return the default stream."""
        return 0

    @contextlib.contextmanager
    def on_second_stream(self) -> Iterator[None]:
        """Note the fork."""
        self.order.append("fork")
        yield

    def wait_for_second_stream(self) -> None:
        """Note the join."""
        assert self.order[-1:] == ["fork"]
        self.order.append("join")

    def capture(self, run: Callable[[], object]) -> CpuReplay:
        """Run once."""
        run()
        return CpuReplay(run)

    def times_us(self, replays: Sequence[Replay]) -> list[float]:
        """Run and time on the wall's clock."""
        marks = [time.perf_counter()]
        for replay in replays:
            replay.run()
            marks.append(time.perf_counter())
        return [1e6 * (b - a) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Nothing is under way."""

    def free_bytes(self) -> int:
        """Return what the test says."""
        return self.memory_bytes
