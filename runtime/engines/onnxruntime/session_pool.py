"""Runs of one ONNX Runtime session: concurrent ones, and prepared ones with their own bindings."""

from collections.abc import Mapping
from threading import Condition, get_ident
from typing import Any
from weakref import WeakSet

import numpy as np

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.engines.engine import check_inputs, closed
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.onnxruntime.bound_session import BoundSession
from trt_lora.runtime.engines.onnxruntime.exp_sums import OnnxRuntimeExpSums
from trt_lora.runtime.engines.onnxruntime.mapped_weights import MappedWeights
from trt_lora.runtime.engines.topk import TEMPERATURES
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class SessionPool:
    """One IOBinding per concurrent run; each keeps its last inputs.

    A thread is given the bindings of its last run where they are free, for most of the next run's
    inputs are bound there.
    """

    def __init__(self, session: Any, manifest: Manifest, weights: MappedWeights) -> None:
        self._session, self.manifest, self._weights = session, manifest, weights
        self.exp_sums = OnnxRuntimeExpSums()
        self._idle: dict[int, BoundSession] = {}  # by the thread that used it last
        self._prepared = WeakSet["OnnxRuntimeTopKRun"]()
        self._running = 0
        self._closed = False
        self._changed = Condition()

    def run(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the session once; see `BoundSession.run`.

        Raises:
            StateError: the pool is closed.
        """
        with self as session:
            idle, bound = self._taken()
            bound = bound or BoundSession(session, self.manifest)
            outputs = bound.run(tensor_map)
            idle[get_ident()] = bound  # the bindings of a run that failed are forgotten
        return outputs

    def prepare_topk(self, tensor_map: TensorMap, logits: str) -> "OnnxRuntimeTopKRun":
        """Make a run that is replayed, with bindings of its own.

        Raises:
            TensorError: an input is missing, or has a dtype or device that the graph refuses.
            StateError: the pool is closed.
        """
        with self:
            run = OnnxRuntimeTopKRun(self, tensor_map, logits)
            self._prepared.add(run)
        return run

    def __enter__(self) -> Any:
        """Lend the session, which is not released meanwhile; any number of threads may have it.

        Raises:
            StateError: the pool is closed.
            BackendError: its weights were written to.
        """
        with self._changed:
            if self._closed:
                raise closed()
            self._weights.check()
            self._running += 1
            return self._session

    def __exit__(self, *error: object) -> None:
        """Take it back."""
        with self._changed:
            self._running -= 1
            if self._closed:
                self._changed.notify_all()

    def release(self) -> None:
        """Let go of the inputs of earlier runs, and of those under way when they have ended.

        A prepared run keeps its own, as its holder does.
        """
        with self._changed:
            self._idle = {}

    def close(self) -> None:
        """Refuse further runs, wait for those under way, and release inputs and session."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running)
            self._idle.clear()
            self._session = None
            self._weights.close()
            for run in self._prepared:
                run.forget()

    def _taken(self) -> tuple[dict[int, BoundSession], BoundSession | None]:
        """Return bindings that no other run has, if there are, and where to put them afterwards."""
        with self._changed:
            bound = self._idle.pop(get_ident(), None)
            if bound is None and self._idle:
                _, bound = self._idle.popitem()
            return self._idle, bound


class OnnxRuntimeTopKRun:
    """A `TopKRun`; see there. Inputs are not copied: the caller writes to its own arrays."""

    def __init__(self, pool: SessionPool, tensor_map: TensorMap, logits: str) -> None:
        """Bind everything; see `Executor.prepare_topk`."""
        manifest = pool.manifest
        names = [binding.name for binding in manifest.inputs]
        check_inputs(tensor_map, names)
        self._pool, self._logits = pool, logits
        self._bound: BoundSession | None = None
        self._found: HostTopK | None = None  # of the last run, until its result is taken
        self._map = TensorMap({name: tensor_map[name] for name in names})
        kept = {*manifest.lora_bindings, *(output.in_place_of for output in manifest.outputs)}
        own = {name: tensor.storage() for name, tensor in self._map.items() if name not in kept}
        # Totals are added up when they are asked for, at any temperature.
        unread = np.zeros(manifest.max_batch_size)
        self.inputs: Mapping[str, Array] = {**own, TEMPERATURES: unread}
        self.bind(TensorMap())

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors, of which ONNX Runtime is given those that differ."""
        with self._pool as session:
            changed = {n: t for n, t in tensor_map.items() if t is not self._map[n]}
            bound, before = self._taken(session), {name: self._map[name] for name in changed}
            self._map.update(changed)
            try:
                bound.bind(changed, self._map)
            except BaseException:
                self._map.update(before)
                raise
            self._bound = bound
        own = {n: t.storage() for n, t in changed.items() if n in self.inputs}
        self.inputs = {**self.inputs, **own}

    def enqueue(self, *, is_fed: bool = False) -> None:
        """Run and wait. Outputs stay where the first run put them."""
        if is_fed:
            raise StateError("runs on the host do not overlap: none can be fed by another")
        with self._pool as session:
            bound = self._taken(session)
            bound.replay()
            self._bound = bound
        self._found = HostTopK.of(bound.outputs[self._logits], self._pool.exp_sums)

    def result(self) -> HostTopK:
        """Return what the last run has found, once."""
        found, self._found = self._found, None
        if found is None:
            raise StateError("no run is under way; enqueue one")
        return found

    def discard(self) -> None:
        """Forget what was found."""
        self._found = None

    def forget(self) -> None:
        """Let go of the session and of all inputs."""
        self._bound, self._found, self._map = None, None, TensorMap()

    def _taken(self, session: Any) -> BoundSession:
        """Return what is bound, new after a failure; it is put back if nothing fails."""
        bound, self._bound = self._bound, None
        if bound is None:
            bound = BoundSession(session, self._pool.manifest)
            bound.bind(list(self._map), self._map)
        return bound
