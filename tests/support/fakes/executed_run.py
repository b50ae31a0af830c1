"""A run of an executor that is prepared for nothing: each is a call of `execute`."""

from collections.abc import Callable, Mapping

import numpy as np

from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.topk import TEMPERATURES
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap


class ExecutedRun:
    """A `TopKRun` on the host."""

    def __init__(
        self,
        execute: Callable[[TensorMap], dict[str, Tensor]],
        manifest: Manifest,
        tensor_map: TensorMap,
        logits: str,
    ) -> None:
        self._execute, self._map, self._logits = execute, TensorMap(tensor_map), logits
        self._found: HostTopK | None = None
        kept = {*manifest.lora_bindings, *(output.in_place_of for output in manifest.outputs)}
        of_host = {n: t for n, t in tensor_map.items() if n not in kept and t.device == HOST}
        own = {name: tensor.storage() for name, tensor in of_host.items()}
        self.inputs: Mapping[str, Array] = {TEMPERATURES: np.zeros(manifest.max_batch_size), **own}

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors."""
        self._map.update(tensor_map)
        own = {n: tensor.storage() for n, tensor in tensor_map.items() if n in self.inputs}
        self.inputs = {**self.inputs, **own}

    def enqueue(self, *, is_fed: bool = False) -> None:
        """Run."""
        assert not is_fed
        self._found = HostTopK.of(self._execute(self._map)[self._logits])

    def result(self) -> HostTopK:
        """Return what was found."""
        found, self._found = self._found, None
        assert found is not None
        return found

    def discard(self) -> None:
        """Forget what was found."""
        self._found = None
