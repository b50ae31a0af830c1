"""The benchmark's device on a CPU: torch, and our kernels by emulation, at tiny sizes."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from kernels import emulator

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip, Launch
from trt_lora.plugins.kernels.launcher import group_of
from trt_lora.plugins.kernels.nvrtc import SLOT_KERNELS
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.gpu.device import CudaDevice, Replay
from trt_lora.scripts.bench.llama import LayerShape

H200 = Chip((9, 0), 132)
TINY = LayerShape(hidden=64, keys=16, inner=128)
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


class CpuDevice(CudaDevice):
    """A device without streams: everything has happened when a call returns."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self.where = torch.device("cpu")
        self.kernels = EmulatedKernels()
        self.chip, self.megahertz = self.kernels.chip, 1755.0
        self.launch = self.launch_early = self.kernels.launch
        self.emptied: list[GroupShape] = []  # of calls of kernels that do nothing
        self.launch_empty = lambda shape, buffers, stream: self.emptied.append(shape)
        self.l2_bytes = 1

    def stream(self) -> int:
        """Return the default stream."""
        return 0

    def enqueue_empty(self, launch: Launch, stream: int) -> None:
        """Do nothing, as the kernel does."""

    def beside(self, run: Callable[[], object], other: Callable[[], object]) -> None:
        """Run one after the other."""
        other()
        run()

    def capture(self, run: Callable[[], object]) -> Replay:
        """Run once."""
        run()
        return Replay(run)

    def times_us(self, replays: Sequence[Replay]) -> list[float]:
        """Run and time on the wall's clock."""
        marks = [time.perf_counter()]
        for replay in replays:
            replay.run()
            marks.append(time.perf_counter())
        return [1e6 * (b - a) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Nothing is under way."""
