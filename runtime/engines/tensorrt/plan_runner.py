"""Runs of a loaded plan: the stream, the contexts and the graphs of an open engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels.candidates import launch_candidates
from trt_lora.runtime.engines.tensorrt.context import BoundContext
from trt_lora.runtime.engines.tensorrt.graphs import GraphCache
from trt_lora.runtime.engines.tensorrt.inputs import OutputShapes, RunInputs
from trt_lora.runtime.engines.tensorrt.mirrored_block import Mirror
from trt_lora.runtime.engines.tensorrt.plan import Plan
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState
from trt_lora.runtime.engines.tensorrt.topk_search import (
    DeviceTopK,
    candidate_outputs,
    candidate_workspace,
    found_on_device,
    search_of,
)
from trt_lora.runtime.engines.topk import TEMPERATURES
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.cuda import Event, OwnStream, call, try_call
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy

_DEFAULT_STREAM = 0


class PlanRunner:
    """One run after another, on the GPU that is current at every call.

    All that is under way when a call returns is of one key: whatever has another waits for it
    first, so that no context changes and no graph goes while it runs.
    """

    def __init__(self, manifest: Manifest, plan: Plan, memory: CudaMemory, max_graphs: int) -> None:
        self._plan = plan
        self._memory = memory
        self._outputs = tuple(binding.name for binding in manifest.outputs)
        self._in_place = {b.name: b.in_place_of for b in manifest.outputs if b.in_place_of}
        self._output_shapes = OutputShapes(manifest)
        self._inputs = RunInputs(manifest, memory)
        self._state = RunState()
        context = plan.new_context()
        self._written = Event()  # on the default stream, by others
        self._under_way: RunKey | None = None  # the run that was enqueued and not waited for
        self._own_stream = OwnStream()
        self._stream = self._own_stream.handle
        self._context = BoundContext(context, self._outputs, plan.unread, self._stream)
        self._graphs = GraphCache(
            max_graphs, self._stream, self._context_for_graph, plan.plugin_calls
        )

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """See `Executor.execute`."""
        profile = self._inputs.update(tensor_map, self._state)
        outputs: dict[str, Tensor] = {}
        staged: dict[str, Tensor] = {}  # held, as the outputs are, until the stream has passed
        with self._synchronized():
            if host := {name: tensor_map[name] for name in self._inputs.on_host}:
                staged.update(self._memory.stage(host, self._stream))
            outputs.update(self._memory.empty(self._output_shapes.infer(tensor_map)))
            for name, tensor in (staged | outputs).items():
                self._state.put(name, (tensor.pointer, tensor.shape))
            self._enqueue(self._state.key(profile))
        outputs.update({name: tensor_map[source] for name, source in self._in_place.items()})
        return {name: outputs[name] for name in self._outputs}

    def replay(self, key: RunKey, mirror: Mirror, copied: Event, *, is_fed: bool) -> None:
        """Enqueue what was prepared: a copy in, a launch, a copy out; `copied` stands for its end.

        Args:
            key: the run.
            mirror: its inputs and outputs on the host.
            copied: to be waited for before the outputs are looked at.
            is_fed: the first input is on the device already.
        """
        if self._under_way is not key:
            self._finish()
        with self._behind_others():
            mirror.upload(self._stream, without_first=is_fed)
            self._enqueue(key, repeats=True)
            mirror.download(self._stream)
            copied.record(self._stream)
            self._under_way = key

    def topk(self, logits: Tensor, temperatures: npt.NDArray[np.float64]) -> DeviceTopK:
        """See `Executor.topk`."""
        bits = tensor_from_numpy(temperatures.view(np.int64))
        with self._synchronized():
            places = self._memory.stage({TEMPERATURES: bits}, self._stream)
            found = candidate_outputs(len(temperatures))
            places |= self._memory.empty(found | candidate_workspace(logits))
            launch_candidates(*search_of(logits, places), self._stream)
        return found_on_device(places, temperatures, logits)

    def save_cache(self) -> None:
        """Write TensorRT-RTX's kernels beside the plan."""
        self._plan.save_cache()

    def close(self) -> None:
        """Release all but the memory of tensors."""
        try_call("cudaStreamSynchronize", self._stream)  # a run that failed may have left work
        self._graphs.clear()
        del self._context, self._graphs  # contexts go before the plan, and compile no more
        del self._own_stream
        self._plan.save_cache()
        del self._plan

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """What the block enqueues comes after the default stream's work, and is done at its end."""
        self._finish()
        with self._behind_others():
            yield
            call("cudaStreamSynchronize", self._stream)

    @contextmanager
    def _behind_others(self) -> Iterator[None]:
        """What the block enqueues comes after the default stream's work.

        If the block raises, all of it is done at its end: its memory may then be freed.
        """
        try:
            self._written.record(_DEFAULT_STREAM)
            self._written.make_wait(self._stream)
            yield
        except BaseException as error:
            try_call("cudaStreamSynchronize", self._stream)
            self._under_way = None
            if isinstance(error, BackendError):
                self._graphs.clear()  # one that was not launched now might never be
            raise

    def _finish(self) -> None:
        """Wait for what is under way."""
        if self._under_way is not None:
            self._under_way = None
            call("cudaStreamSynchronize", self._stream)

    def _enqueue(self, key: RunKey, *, repeats: bool = False) -> None:
        if not self._graphs.run(key, repeats=repeats):
            with self._plan.plugin_calls():
                self._context.run(key)

    def _context_for_graph(self) -> BoundContext:
        context = self._plan.new_context(for_graph=True)
        return BoundContext(context, self._outputs, self._plan.unread, self._stream)
