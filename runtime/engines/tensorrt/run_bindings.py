"""What a run that is replayed is bound to, and the key of its graph."""

from collections.abc import Mapping
from dataclasses import replace

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.tensorrt.inputs import RunInputs
from trt_lora.runtime.engines.tensorrt.output_shapes import OutputShapes, TensorShape
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState, TopKSearch, frozen_copy
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap

_KNOWN_KEYS = 32  # one for each adapter in turns


class RunBindings:
    """Inputs of the caller's, and a block of the run's own for all else."""

    def __init__(
        self,
        manifest: Manifest,
        memory: CudaMemory,
        tensor_map: TensorMap,
        block: Mapping[str, Tensor],
        search: TopKSearch,
    ) -> None:
        """Bind everything.

        Args:
            manifest: of the engine.
            memory: of its GPU.
            tensor_map: all inputs.
            block: where inputs on the host are copied to, and all outputs.
            search: that is launched behind the engine.

        Raises:
            TensorError: the engine refuses the shape, dtype or device of an input.
        """
        self._inputs, self._state = RunInputs(manifest, memory), RunState()
        self._search = search
        for output in manifest.outputs:
            if output.name in block:
                place = block[output.name]
                self._state.put(output.name, (place.pointer, place.shape))
        self._map = tensor_map
        self._keys: dict[RunKey, RunKey] = {}  # in the order of their making
        self.bind(TensorMap({b.name: block[b.name] for b in manifest.inputs if b.name in block}))

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors; what is the same is not looked at again by a run."""
        candidate = TensorMap(self._map | tensor_map)
        profile = self._inputs.update(candidate, self._state)
        if on_host := self._inputs.on_host:
            raise TensorError(
                f"{on_host[0]} lies on the host; a prepared run takes what the engine's memory "
                "made, or what was on the host when it was prepared"
            )
        found = replace(frozen_copy(self._state.key(profile)), search=self._search)
        self.key, self._map = self._known(found), candidate

    def _known(self, key: RunKey) -> RunKey:
        """The same object for the same run: its graph is found without comparing addresses."""
        if key not in self._keys:
            if len(self._keys) == _KNOWN_KEYS:
                del self._keys[next(iter(self._keys))]
            self._keys[key] = key
        return self._keys[key]


def split_inputs(manifest: Manifest, tensor_map: TensorMap) -> tuple[TensorMap, TensorMap]:
    """Return all inputs of the engine, and those of them that are on the host.

    Raises:
        TensorError: one is missing.
    """
    names = tuple(binding.name for binding in manifest.inputs)
    check_inputs(tensor_map, names)
    given = TensorMap({name: tensor_map[name] for name in names})
    return given, TensorMap({name: t for name, t in given.items() if t.device == HOST})


def outputs_of(manifest: Manifest, inputs: TensorMap) -> list[TensorShape]:
    """Return every output that has memory of its own."""
    places = {name: (tensor.pointer, tensor.shape) for name, tensor in inputs.items()}
    return OutputShapes(manifest).infer(places)
