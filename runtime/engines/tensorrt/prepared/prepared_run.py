"""A run that comes again and again: what it reads and writes stays where it is."""

from collections.abc import Callable, Mapping

from trt_lora.runtime.engines.tensorrt.prepared.mirrored_block import Mirror, MirroredBlock
from trt_lora.runtime.engines.tensorrt.prepared.run_bindings import (
    RunBindings,
    outputs_of,
    split_inputs,
)
from trt_lora.runtime.engines.tensorrt.run_key import RunKey
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class TensorRTPreparedRun:
    """A `PreparedRun`; see there. Nothing is allocated or bound in `run`."""

    def __init__(
        self,
        manifest: Manifest,
        memory: CudaMemory,
        tensor_map: TensorMap,
        repeat: Callable[[RunKey, Mirror], None],
    ) -> None:
        """Allocate the blocks and bind everything; see `PreparesRuns.prepare`.

        Args:
            manifest: of the engine.
            memory: of its GPU, which is current.
            tensor_map: all inputs.
            repeat: runs the engine.
        """
        given, on_host = split_inputs(manifest, tensor_map)
        self._repeat = repeat
        self._block = MirroredBlock(memory, on_host, outputs_of(manifest, given))
        self._bindings = RunBindings(manifest, memory, given, self._block.on_device)

    @property
    def inputs(self) -> Mapping[str, Array]:
        """What the caller writes before a run."""
        return self._block.mirrors[0].inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """What a run leaves on the host."""
        return self._block.mirrors[0].outputs

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors; what is the same is not looked at again by a run."""
        self._bindings.bind(tensor_map)

    def run(self) -> None:
        """Run and wait."""
        self._repeat(self._bindings.key, self._block.mirrors[0])
