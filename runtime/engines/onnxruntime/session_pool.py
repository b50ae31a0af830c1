"""Pool of IOBindings over one ONNX Runtime session, for concurrent runs."""

from threading import Condition, get_ident
from typing import Any

from trt_lora.runtime.engines.engine import closed
from trt_lora.runtime.engines.onnxruntime.bound_session import BoundSession
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class SessionPool:
    """One IOBinding per concurrent run; each keeps its last inputs.

    A thread is given the bindings of its last run where they are free, for most of the next run's
    inputs are bound there.
    """

    def __init__(self, session: Any, manifest: Manifest) -> None:
        self._session, self._manifest = session, manifest
        self._idle: dict[int, BoundSession] = {}  # by the thread that used it last
        self._running = 0
        self._closed = False
        self._changed = Condition()

    def run(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the session once; see `BoundSession.run`.

        Raises:
            StateError: the pool is closed.
        """
        idle, bound = self._acquire()
        try:
            outputs = bound.run(tensor_map)
            idle[get_ident()] = bound  # the bindings of a run that failed are forgotten
        finally:
            self._end()
        return outputs

    def release(self) -> None:
        """Let go of the inputs of earlier runs, and of those under way when they have ended."""
        with self._changed:
            self._idle = {}

    def close(self) -> None:
        """Refuse further runs, wait for those under way, and release the last inputs."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running)
            self._idle.clear()

    def _acquire(self) -> tuple[dict[int, BoundSession], BoundSession]:
        """Return bindings that no other run has, and where to put them afterwards."""
        with self._changed:
            if self._closed:
                raise closed()
            bound = self._idle.pop(get_ident(), None)
            if bound is None and self._idle:
                _, bound = self._idle.popitem()
            bound = bound or BoundSession(self._session, self._manifest)  # may be interrupted
            self._running += 1
            return self._idle, bound

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
