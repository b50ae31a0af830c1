"""A run that comes again and again: what it reads and writes stays bound."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.onnxruntime.bound_session import BoundSession
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class OnnxRuntimePreparedRun:
    """A `PreparedRun`; see there. Inputs are not copied: the caller writes to its own arrays."""

    def __init__(
        self,
        pool: AbstractContextManager[Any],
        manifest: Manifest,
        tensor_map: TensorMap,
    ) -> None:
        """Bind everything; see `PreparesRuns.prepare`.

        Args:
            pool: lends ONNX Runtime's session.
            manifest: of the engine.
            tensor_map: all inputs.
        """
        names = [binding.name for binding in manifest.inputs]
        check_inputs(tensor_map, names)
        self._pool, self._manifest = pool, manifest
        self._bound: BoundSession | None = None
        self._map = TensorMap({name: tensor_map[name] for name in names})
        kept = {*manifest.lora_bindings, *(output.in_place_of for output in manifest.outputs)}
        self.inputs = {n: tensor.storage() for n, tensor in self._map.items() if n not in kept}
        self.outputs: Mapping[str, Tensor] = {}  # from the first run on
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
        self.inputs |= {n: t.storage() for n, t in changed.items() if n in self.inputs}

    def run(self) -> None:
        """Run and wait. Outputs stay where the first run put them."""
        with self._pool as session:
            bound = self._taken(session)
            bound.repeat()
            self._bound = bound
        self.outputs = bound.outputs

    def forget(self) -> None:
        """Let go of the session and of all inputs."""
        self._bound, self._map = None, TensorMap()

    def _taken(self, session: Any) -> BoundSession:
        """Return what is bound, new after a failure, for whoever puts it back if nothing fails."""
        bound, self._bound = self._bound, None
        if bound is None:
            bound = BoundSession(session, self._manifest)
            bound.bind(list(self._map), self._map)
        return bound
