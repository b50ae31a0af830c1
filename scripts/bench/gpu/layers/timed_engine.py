"""Engine runs timed by CUDA events, without Python's overhead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.engines.tensorrt.context import BoundContext
from trt_lora.runtime.engines.tensorrt.graphs import GraphCache, GraphOptions
from trt_lora.runtime.engines.tensorrt.inputs import RunInputs
from trt_lora.runtime.engines.tensorrt.output_shapes import OutputShapes
from trt_lora.runtime.engines.tensorrt.plan import Plan
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.memory.cuda import call, constant, synchronized, try_call
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.tensor import TensorMap

_WARM_UP = 3  # kernels are specialised, then the graph is captured, then launched


class TimedRun:
    """A run whose inputs and outputs stay where they are on the device; times are in us."""

    def __init__(self, plan: Plan, key: RunKey, outputs: tuple[str, ...], stream: int) -> None:
        """Run a few times, until the run has a graph, if it can have one."""
        self._plan, self._key, self._stream = plan, key, stream

        def context(*, for_graph: bool) -> BoundContext:
            return BoundContext(plan.new_context(for_graph=for_graph), outputs, stream)

        self._context = context(for_graph=False)
        self._graphs = GraphCache(GraphOptions(), stream, lambda: context(for_graph=True))
        for _ in range(_WARM_UP):
            self.enqueue_us()
            self.has_graph = self._launches_graph()

    def enqueue_us(self) -> float:
        """Return what one run takes that TensorRT enqueues kernel by kernel."""
        return self._us(lambda: self._context.run(self._key))

    def graph_us(self) -> float:
        """Return what one launch of the run's captured graph takes."""
        return self._us(lambda: self._graphs.run(self._key))

    def close(self) -> None:
        """Let go of contexts and graph, which must go before the plan."""
        self._graphs.clear()
        del self._graphs, self._context, self._plan

    def _launches_graph(self) -> bool:
        with synchronized(self._stream), self._plan.plugin_calls():
            return self._graphs.run(self._key)

    def _us(self, enqueue: Callable[[], object]) -> float:
        start, end = (call("cudaEventCreateWithFlags", 0) for _ in range(2))  # with their times
        try:
            with synchronized(self._stream), self._plan.plugin_calls():
                call("cudaEventRecord", start, self._stream)
                enqueue()
                call("cudaEventRecord", end, self._stream)
            return 1e3 * float(call("cudaEventElapsedTime", start, end))
        finally:
            _destroy(start, end)


@contextmanager
def timed_run(directory: Path, inputs: TensorMap) -> Iterator[tuple[TimedRun, str]]:
    """Load an engine's plan and bind a run; yield it with the name of its optimization profile.

    Args:
        directory: the engine.
        inputs: every input, on the host or on the device.

    Raises:
        BackendError: TensorRT refuses the plan or the run.
        TensorError: the engine takes no such inputs.
    """
    manifest = read_manifest(directory)
    memory = CudaMemory(int(call("cudaGetDevice")))
    stream = int(call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking")))
    try:
        plan = Plan(directory, manifest, flavour_named(manifest.flavour), memory)
        given = memory.upload({binding.name: inputs[binding.name] for binding in manifest.inputs})
        state = RunState()
        index = RunInputs(manifest, memory).update(TensorMap(given), state)
        outputs = memory.empty(OutputShapes(manifest).infer(state.addresses))
        for name, tensor in outputs.items():
            state.put(name, (tensor.pointer, tensor.shape))
        names = tuple(binding.name for binding in manifest.outputs)
        run = TimedRun(plan, state.key(index), names, stream)
        try:
            yield run, list(manifest.profiles)[index]
        finally:
            run.close()
    finally:
        try_call("cudaStreamDestroy", stream)
        memory.close()


def _destroy(*events: Any) -> None:
    for event in events:
        try_call("cudaEventDestroy", event)
