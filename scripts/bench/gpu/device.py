"""GPU device of the benchmark: tensors, captured graphs and replay times."""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip, Launch
from trt_lora.plugins.kernels.launcher import Kernels, chip_of
from trt_lora.runtime.memory.cuda import call, constant, uncollected
from trt_lora.scripts.bench.gpu import contestants

_CUDA: Any = torch.cuda  # half of it has no types

# Enqueues one call of the operator on a CUDA stream.
LaunchCall = Callable[[GroupShape, GroupBuffers, int], None]
_HIGHEST = -100  # a priority beyond the highest is that


@dataclass(frozen=True)
class Replay:
    """Work that was captured once and can be run again."""

    run: Callable[[], object]  # enqueues it on torch's current stream
    nodes: int | None = None  # of the graph, where they can be counted


class CudaDevice:
    """The current GPU, through torch; the tests have a subclass on the CPU.

    Attributes:
        dtype: of weights, factors and activations.
        where: its tensors are.
        chip: what the kernels are planned for.
        megahertz: of its clock, at most.
        launch: enqueues a call; `launch_empty` kernels that do nothing in its place, and
            `launch_early` those that begin before the kernel before them has ended.
        l2_bytes: size of the level-2 cache.
    """

    dtype: torch.dtype
    where: torch.device
    chip: Chip
    megahertz: float
    launch: LaunchCall
    launch_empty: LaunchCall
    launch_early: LaunchCall
    l2_bytes: int

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        """Take the GPU: from here on there is a CUDA context."""
        _CUDA.init()
        self.dtype = dtype
        self.where = torch.device("cuda", _CUDA.current_device())
        number = int(_CUDA.current_device())
        self.chip = chip_of(number)
        clock = constant("cudaDeviceAttr").cudaDevAttrClockRate  # in kHz
        self.megahertz = int(call("cudaDeviceGetAttribute", clock, number)) / 1e3
        self.launch = Kernels().launch
        self.launch_empty = functools.partial(contestants.launch_empty, chip=self.chip)
        self.launch_early = functools.partial(contestants.launch_early, chip=self.chip)
        self.l2_bytes = int(_CUDA.get_device_properties(self.where).L2_cache_size)
        self._stream, self._second = _CUDA.Stream(), _CUDA.Stream(priority=_HIGHEST)
        self.empty(1)  # makes the context current for the driver's own calls

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed values: zeros would be multiplied faster."""
        values = torch.empty(shape, dtype=self.dtype, device=self.where)
        return values.normal_(std=scale)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory that holds NaNs, so that what is never written is found."""
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.where)

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return int(_CUDA.current_stream().cuda_stream)

    def enqueue_empty(self, launch: Launch, stream: int) -> None:
        """Enqueue one launch of a kernel that does nothing."""
        contestants.enqueue_empty(launch, stream, self.chip)

    def beside(self, run: Callable[[], object], other: Callable[[], object]) -> None:
        """Enqueue `other` on a second stream, of the highest priority, beside `run`."""
        current = _CUDA.current_stream()
        self._second.wait_stream(current)
        with _CUDA.stream(self._second):
            other()
        run()
        current.wait_stream(self._second)

    def capture(self, run: Callable[[], object]) -> Replay:
        """Run once, which loads kernels and sizes workspaces, and capture a second run."""
        _CUDA.synchronize()  # tensors were made on the default stream
        with _CUDA.stream(self._stream):
            run()
            _CUDA.synchronize()
            graph = _CUDA.CUDAGraph(keep_graph=True)  # kept so that its nodes can be counted
            with uncollected():
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        graph.instantiate()
        return Replay(graph.replay, _count_nodes(graph))

    def times_us(self, replays: Sequence[Replay]) -> list[float]:
        """Run the replays one after another; return the microseconds of each."""
        with _CUDA.stream(self._stream):
            marks = [_CUDA.Event(enable_timing=True) for _ in range(len(replays) + 1)]
            marks[0].record()
            for replay, mark in zip(replays, marks[1:], strict=True):
                replay.run()
                mark.record()
        marks[-1].synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Wait for everything."""
        _CUDA.synchronize()


def _count_nodes(graph: Any) -> int | None:
    """The nodes of a captured graph; None where this torch or cuda-python does not tell."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    try:
        status, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), numNodes=0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return int(count) if not int(status) else None
