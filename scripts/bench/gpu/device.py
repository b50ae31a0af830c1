"""GPU device of the benchmark: tensors, captured graphs and replay times."""

import contextlib
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launcher import Kernels

_CUDA: Any = torch.cuda  # half of it has no types


class Launcher(Protocol):
    """Launches one call of the operator."""

    def launch(self, shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
        """Enqueue the call on a CUDA stream."""
        ...


class Replay(Protocol):
    """Work that was captured once and can be run again."""

    @property
    def nodes(self) -> int | None:
        """Nodes of the graph, where they can be counted."""
        ...

    def run(self) -> None:
        """Enqueue it."""
        ...


class Device(Protocol):
    """Device of a workload. The tests have one on the CPU."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, factors and activations."""
        ...

    @property
    def where(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def kernels(self) -> Launcher:
        """What launches the LoRA kernels."""
        ...

    @property
    def l2_bytes(self) -> int:
        """Size of the level-2 cache."""
        ...

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed values: zeros would be multiplied faster."""
        ...

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory that holds NaNs, so that what is never written is found."""
        ...

    def stream(self) -> int:
        """Return the handle of the current stream."""
        ...

    def capture(self, run: Callable[[], object]) -> Replay:
        """Run once, which loads kernels and sizes workspaces, and capture a second run."""
        ...

    def times_us(self, replays: Sequence[Replay]) -> list[float]:
        """Run the replays one after another; return the microseconds of each."""
        ...

    def synchronize(self) -> None:
        """Wait for everything."""
        ...


@dataclass(frozen=True)
class CudaReplay:
    """A captured graph."""

    graph: Any
    nodes: int | None

    def run(self) -> None:
        """Launch it on torch's current stream."""
        self.graph.replay()


class CudaDevice:
    """The current GPU, through torch."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        """Take the GPU: from here on there is a CUDA context."""
        _CUDA.init()
        self.dtype = dtype
        self.where = torch.device("cuda", _CUDA.current_device())
        self.kernels: Launcher = Kernels()
        self.l2_bytes = int(_CUDA.get_device_properties(self.where).L2_cache_size)
        self._stream = _CUDA.Stream()
        self.empty(1)  # makes the context current for the driver's own calls

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """See `Device`."""
        values = torch.empty(shape, dtype=self.dtype, device=self.where)
        return values.normal_(std=scale)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `Device`."""
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.where)

    def stream(self) -> int:
        """See `Device`."""
        return int(_CUDA.current_stream().cuda_stream)

    def capture(self, run: Callable[[], object]) -> CudaReplay:
        """See `Device`."""
        _CUDA.synchronize()  # tensors were made on the default stream
        with _CUDA.stream(self._stream):
            run()
            _CUDA.synchronize()
            graph = _CUDA.CUDAGraph(keep_graph=True)  # kept so that its nodes can be counted
            with _no_collection():
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        graph.instantiate()
        return CudaReplay(graph, _count_nodes(graph))

    def times_us(self, replays: Sequence[Replay]) -> list[float]:
        """See `Device`."""
        with _CUDA.stream(self._stream):
            marks = [_CUDA.Event(enable_timing=True) for _ in range(len(replays) + 1)]
            marks[0].record()
            for replay, mark in zip(replays, marks[1:], strict=True):
                replay.run()
                mark.record()
        marks[-1].synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """See `Device`."""
        _CUDA.synchronize()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from finalizing old buffers now: a free would end the capture."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _count_nodes(graph: Any) -> int | None:
    """The nodes of a captured graph; None where this torch or cuda-python does not tell."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    try:
        status, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), numNodes=0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return int(count) if not int(status) else None
