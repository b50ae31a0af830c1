"""Pool of IOBindings over one ONNX Runtime session, for concurrent runs."""

from threading import Condition, get_ident
from typing import Any
from weakref import WeakSet

from trt_lora.runtime.engines.engine import closed
from trt_lora.runtime.engines.onnxruntime.bound_session import BoundSession
from trt_lora.runtime.engines.onnxruntime.exp_sums import OnnxRuntimeExpSums
from trt_lora.runtime.engines.onnxruntime.mapped_weights import MappedWeights
from trt_lora.runtime.engines.onnxruntime.topk_run import OnnxRuntimeTopKRun
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class SessionPool:
    """One IOBinding per concurrent run; each keeps its last inputs.

    A thread is given the bindings of its last run where they are free, for most of the next run's
    inputs are bound there.
    """

    def __init__(self, session: Any, manifest: Manifest, weights: MappedWeights) -> None:
        self._session, self._manifest, self._weights = session, manifest, weights
        self.exp_sums = OnnxRuntimeExpSums()
        self._idle: dict[int, BoundSession] = {}  # by the thread that used it last
        self._prepared = WeakSet[OnnxRuntimeTopKRun]()
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
            bound = bound or BoundSession(session, self._manifest)
            outputs = bound.run(tensor_map)
            idle[get_ident()] = bound  # the bindings of a run that failed are forgotten
        return outputs

    def prepare_topk(self, tensor_map: TensorMap, logits: str) -> OnnxRuntimeTopKRun:
        """Make a run that is replayed, with bindings of its own.

        Raises:
            TensorError: an input is missing, or has a dtype or device that the graph refuses.
            StateError: the pool is closed.
        """
        with self:
            run = OnnxRuntimeTopKRun(self, self._manifest, tensor_map, logits, self.exp_sums)
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
