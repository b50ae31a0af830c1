"""A pre-bound run, replayed every step: what it reads and writes stays bound."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.host_topk import ExpSums, HostTopK
from trt_lora.runtime.engines.onnxruntime.bound_session import BoundSession
from trt_lora.runtime.engines.topk import TEMPERATURES
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import TensorMap


class OnnxRuntimeTopKRun:
    """A `TopKRun`; see there. Inputs are not copied: the caller writes to its own arrays."""

    def __init__(
        self,
        pool: AbstractContextManager[Any],
        manifest: Manifest,
        tensor_map: TensorMap,
        logits: str,
        exp_sums: ExpSums,
    ) -> None:
        """Bind everything; see `Executor.prepare_topk`.

        Args:
            pool: lends ONNX Runtime's session.
            manifest: of the engine.
            tensor_map: all inputs.
            logits: the output whose best tokens are found.
            exp_sums: of their weights.
        """
        names = [binding.name for binding in manifest.inputs]
        check_inputs(tensor_map, names)
        self._pool, self._manifest, self._logits, self._exp_sums = pool, manifest, logits, exp_sums
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
        self._found = HostTopK.of(bound.outputs[self._logits], self._exp_sums)

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
            bound = BoundSession(session, self._manifest)
            bound.bind(list(self._map), self._map)
        return bound
