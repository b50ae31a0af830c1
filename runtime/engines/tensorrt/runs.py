"""Runs of a loaded plan: the stream, the contexts and the graphs of an open engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.engines.tensorrt.context import BoundContext
from trt_lora.runtime.engines.tensorrt.graphs import GraphCache, GraphOptions
from trt_lora.runtime.engines.tensorrt.inputs import RunInputs
from trt_lora.runtime.engines.tensorrt.mirrored_block import MirroredBlock
from trt_lora.runtime.engines.tensorrt.output_shapes import OutputShapes
from trt_lora.runtime.engines.tensorrt.plan import Plan
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.cuda import Event, call, constant, synchronized, try_call
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

_DEFAULT_STREAM = 0


class Runs:
    """One run after another, on the GPU that is current at every call."""

    def __init__(
        self, manifest: Manifest, plan: Plan, memory: CudaMemory, graphs: GraphOptions
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._outputs = tuple(binding.name for binding in manifest.outputs)
        self._in_place = {b.name: b.in_place_of for b in manifest.outputs if b.in_place_of}
        self._output_shapes = OutputShapes(manifest)
        self._inputs = RunInputs(manifest, memory)
        self._state = RunState()
        context = plan.new_context()
        self._written = Event()  # on the default stream, by others
        flags = constant("cudaStreamNonBlocking")
        # Last: what fails before leaves no stream behind.
        self._stream = int(call("cudaStreamCreateWithFlags", flags))
        self._context = BoundContext(context, self._outputs, self._stream)
        self._graphs = GraphCache(graphs, self._stream, self._context_for_graph)

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """See `Executor.execute`."""
        profile = self._inputs.update(tensor_map, self._state)
        outputs: dict[str, Tensor] = {}
        staged: dict[str, Tensor] = {}  # held, as the outputs are, until the stream has passed
        with self._in_order():
            staged.update(self._stage(tensor_map))
            outputs.update(self._memory.empty(self._output_shapes.infer(self._state.addresses)))
            self._put(outputs)
            self._enqueue(self._state.key(profile))
        outputs.update({name: tensor_map[source] for name, source in self._in_place.items()})
        return {name: outputs[name] for name in self._outputs}

    def repeat(self, key: RunKey, block: MirroredBlock) -> None:
        """Run what was prepared, and wait for it: a copy in, a launch, a copy out."""
        with self._in_order():
            block.upload(self._stream)
            self._enqueue(key, repeats=True)
            block.download(self._stream)

    def close(self) -> None:
        """Release all but the memory of tensors."""
        try_call("cudaStreamSynchronize", self._stream)  # a run that failed may have left work
        self._graphs.clear()
        del self._context, self._graphs  # contexts go before the plan, and compile no more
        try_call("cudaStreamDestroy", self._stream)
        self._plan.save_cache()
        del self._plan

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """What the block enqueues comes after the default stream's work, and is done at its end."""
        try:
            with synchronized(self._stream):
                self._written.record(_DEFAULT_STREAM)
                self._written.make_wait(self._stream)
                yield
        except BackendError:
            # A LoRA node that failed has written nothing, and a graph may have been made of that.
            self._graphs.clear()
            raise

    def _enqueue(self, key: RunKey, *, repeats: bool = False) -> None:
        with self._plan.plugin_calls():
            if not self._graphs.run(key, repeats=repeats):
                self._context.run(key)

    def _stage(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        host = {name: tensor_map[name] for name in self._inputs.on_host}
        staged = self._memory.stage(host, self._stream) if host else {}
        self._put(staged)
        return staged

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._state.put(name, (tensor.pointer, tensor.shape))

    def _context_for_graph(self) -> BoundContext:
        return BoundContext(self._plan.new_context(for_graph=True), self._outputs, self._stream)
