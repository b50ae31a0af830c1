"""GPU engine on TensorRT or TensorRT-RTX: one stream, CUDA graphs for repeated runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.engines.engine import closed, open_already
from trt_lora.runtime.engines.tensorrt.context import BoundContext
from trt_lora.runtime.engines.tensorrt.graphs import GraphCache, GraphOptions
from trt_lora.runtime.engines.tensorrt.inputs import RunInputs
from trt_lora.runtime.engines.tensorrt.output_shapes import OutputShapes
from trt_lora.runtime.engines.tensorrt.plan import Plan
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState
from trt_lora.runtime.manifest import Manifest, Range
from trt_lora.runtime.memory.cuda import Event, call, constant, on_device, synchronized, try_call
from trt_lora.runtime.memory.device import CudaMemory, MemoryOptions
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

_DEFAULT_STREAM = 0


class TensorRTEngine:
    """An `Engine` on a GPU. LoRA weights and cache stay on the device; tokens are uploaded.

    Who waits for whom: all work of the engine is enqueued on one stream of its own. At each run
    that stream waits for what the default stream was given before: that is where tensors of other
    libraries are ready (`tensor_from` asks for it), and where callers may write to them. Whoever
    writes on other streams waits before calling `execute`. `execute` waits for its stream before
    it returns, so that every stream and the host may use the outputs, and inputs may be let go of.

    The stream does not wait for the default stream by itself, nor that for it: work of other
    threads on the default stream would make a capture fail. Any number of threads may call
    `execute`: one run follows the other, whole, for all contexts share the stream and the
    activation memory. Other threads may upload and let go of tensors meanwhile. All of it happens
    on the GPU that was current when the engine was opened; every thread keeps its own.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        memory: MemoryOptions | None = None,
        graphs: GraphOptions | None = None,
    ) -> None:
        """Describe the engine; nothing touches the GPU before `with`."""
        self.directory = directory
        self.manifest = manifest
        self.memory = CudaMemory()
        self.rank_multiple = manifest.rank_multiple
        self.input_names = tuple(binding.name for binding in manifest.inputs)
        self.output_names = tuple(binding.name for binding in manifest.outputs)
        self._flavour = flavour_named(manifest.flavour)
        self._memory_options, self._graph_options = memory, graphs or GraphOptions()
        self._output_shapes = OutputShapes(manifest)
        self._open: _OpenEngine | None = None
        self._lock = Lock()  # held by a run from its first binding to its last byte

    def __enter__(self) -> Self:
        """Load the plan onto the current GPU; `warm_up` is left to the caller.

        Raises:
            BackendError: the library cannot be imported, or refuses the plan on this GPU.
            StateError: the engine is open already.
        """
        with self._lock:
            if self._open is not None:
                raise open_already()
            memory = CudaMemory(int(call("cudaGetDevice")), self._memory_options)
            plan = Plan(self.directory, self.manifest, self._flavour, memory)
            self._open = _OpenEngine(self, plan, memory, self._graph_options)
            self.memory = memory
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release graphs, contexts, plan, stream and memory, and write the runtime cache.

        It waits for the run under way in another thread. Tensors stay until their owners let go.
        """
        with self._lock:
            engine, self._open = self._open, None
            if engine is not None:
                with on_device(self.memory.index, try_call):
                    engine.close()
            self.memory.close()

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the plan once and wait for it; see `Executor.execute`."""
        with self._alone() as engine:
            return engine.execute(tensor_map, self._output_shapes)

    def release_inputs(self) -> None:
        """Do nothing: the engine keeps addresses of earlier inputs, and no memory."""

    def warm_up(self) -> None:
        """Run every profile once, at the shapes it is tuned for, on zeros and the base model.

        So the first token of a user does not wait for what TensorRT does at a first run, and
        TensorRT-RTX has the kernels for these shapes in its cache. It takes about as long as a
        prompt of full length; in a new cache, as long as compiling takes.

        Raises:
            BackendError: the device is out of memory.
            StateError: called outside `with`.
        """
        for ranges in self.manifest.profiles.values():
            self.execute(self._zeros(ranges))

    @contextmanager
    def _alone(self) -> Iterator["_OpenEngine"]:
        """Give this thread the engine and its GPU, one thread at a time."""
        with self._lock:
            if self._open is None:
                raise closed()
            with on_device(self.memory.index):
                yield self._open

    def _zeros(self, ranges: Mapping[str, Range]) -> TensorMap:
        """All inputs of one run, in one buffer of zeros: they are only read."""
        shapes = {name: r.opt for name, r in ranges.items()}
        for name, (site, factor) in self.manifest.lora_bindings.items():
            shapes[name] = site.shape(factor, MIN_RANK)
        inputs = {
            binding.name: Tensor(0, shapes[binding.name], binding.dtype)
            for binding in self.manifest.inputs
        }
        zeros = self.memory.zeros(max(tensor.nbytes for tensor in inputs.values()))
        return TensorMap(
            (name, replace(t, pointer=zeros.pointer, device=zeros.device, owner=zeros))
            for name, t in inputs.items()
        )


class _OpenEngine:
    """Stream, contexts and graphs of an engine inside `with`."""

    def __init__(
        self, engine: TensorRTEngine, plan: Plan, memory: CudaMemory, graphs: GraphOptions
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._outputs = engine.output_names
        self._inputs = RunInputs(engine.manifest, memory)
        self._state = RunState()
        context = plan.new_context()
        self._written = Event()  # on the default stream, by others
        flags = constant("cudaStreamNonBlocking")
        # Last: what fails before leaves no stream behind.
        self._stream = int(call("cudaStreamCreateWithFlags", flags))
        self._context = BoundContext(context, self._outputs, self._stream)
        self._graphs = GraphCache(graphs, self._stream, self._context_for_graph)

    def execute(self, tensor_map: TensorMap, output_shapes: OutputShapes) -> dict[str, Tensor]:
        """See `Executor.execute`."""
        profile = self._inputs.update(tensor_map, self._state)
        outputs: dict[str, Tensor] = {}
        staged: dict[str, Tensor] = {}  # held, as the outputs are, until the stream has passed
        try:
            with synchronized(self._stream):
                self._written.record(_DEFAULT_STREAM)
                self._written.make_wait(self._stream)
                staged.update(self._stage(tensor_map))
                outputs.update(self._memory.empty(output_shapes.infer(self._state.addresses)))
                self._put(outputs)
                self._enqueue(self._state.key(profile))
        except BackendError:
            # A LoRA node that failed has written nothing, and a graph may have been made of that.
            self._graphs.clear()
            raise
        return outputs

    def _enqueue(self, key: RunKey) -> None:
        with self._plan.plugin_calls():
            if not self._graphs.run(key):
                self._context.run(key)

    def close(self) -> None:
        """Release all but the memory of tensors."""
        try_call("cudaStreamSynchronize", self._stream)  # a run that failed may have left work
        self._graphs.clear()
        del self._context, self._graphs  # contexts go before the plan, and compile no more
        try_call("cudaStreamDestroy", self._stream)
        self._plan.save_cache()
        del self._plan

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
