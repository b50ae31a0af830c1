"""A run that comes again and again: what it reads and writes stays where it is."""

from collections.abc import Callable, Mapping

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.tensorrt.inputs import RunInputs
from trt_lora.runtime.engines.tensorrt.mirrored_block import MirroredBlock
from trt_lora.runtime.engines.tensorrt.output_shapes import OutputShapes
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState, frozen_copy
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap

_KNOWN_KEYS = 32  # one for each adapter in turns


class TensorRTPreparedRun:
    """A `PreparedRun`; see there. Nothing is allocated or bound in `run`."""

    def __init__(
        self,
        manifest: Manifest,
        memory: CudaMemory,
        tensor_map: TensorMap,
        repeat: Callable[[RunKey, MirroredBlock], None],
    ) -> None:
        """Allocate the blocks and bind everything; see `PreparesRuns.prepare`.

        Args:
            manifest: of the engine.
            memory: of its GPU, which is current.
            tensor_map: all inputs.
            repeat: runs the engine.
        """
        names = tuple(binding.name for binding in manifest.inputs)
        check_inputs(tensor_map, names)
        self._repeat = repeat
        self._inputs, self._state = RunInputs(manifest, memory), RunState()
        given = {name: tensor_map[name] for name in names}
        on_host = {name: tensor for name, tensor in given.items() if tensor.device == HOST}
        places = {name: (tensor.pointer, tensor.shape) for name, tensor in given.items()}
        self._block = MirroredBlock(memory, on_host, OutputShapes(manifest).infer(places))
        for name in self._block.outputs:
            place = self._block.on_device[name]
            self._state.put(name, (place.pointer, place.shape))
        self._map = TensorMap(given)
        self._keys: dict[RunKey, RunKey] = {}  # in the order of their making
        self.bind(TensorMap({name: self._block.on_device[name] for name in on_host}))

    @property
    def inputs(self) -> Mapping[str, Array]:
        """What the caller writes before a run."""
        return self._block.inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """What a run leaves on the host."""
        return self._block.outputs

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors; what is the same is not looked at again by a run."""
        candidate = TensorMap(self._map | tensor_map)
        profile = self._inputs.update(candidate, self._state)
        if on_host := self._inputs.on_host:
            raise TensorError(
                f"{on_host[0]} lies on the host; a prepared run takes what the engine's memory "
                "made, or what was on the host when it was prepared"
            )
        self._key, self._map = self._known(frozen_copy(self._state.key(profile))), candidate

    def run(self) -> None:
        """Run and wait."""
        self._repeat(self._key, self._block)

    def _known(self, key: RunKey) -> RunKey:
        """The same object for the same run: its graph is found without comparing addresses."""
        if key not in self._keys:
            if len(self._keys) == _KNOWN_KEYS:
                del self._keys[next(iter(self._keys))]
            self._keys[key] = key
        return self._keys[key]
