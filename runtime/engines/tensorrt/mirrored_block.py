"""Inputs and outputs of a run in one pinned and one device block, laid out alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trt_lora.runtime.memory.cuda import call, constant
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import pack
from trt_lora.runtime.memory.staging import PinnedBuffer
from trt_lora.runtime.memory.tensor import HOST, Tensor


class MirroredBlock:
    """Inputs first, then outputs: each way one copy moves all of them.

    Whoever enqueues a copy waits for it before the next, and before letting go of the block.
    """

    def __init__(
        self,
        memory: CudaMemory,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[tuple[str, str, tuple[int, ...]]],
    ) -> None:
        """Allocate both blocks, and write the inputs to the pinned one.

        Args:
            memory: of the GPU, which is current.
            inputs: on the host.
            outputs: (name, dtype, shape) of each.

        Raises:
            BackendError: the device or the host is out of memory.
        """
        self._in_bytes, places = pack(inputs, memory.device)
        self._out_bytes, out_places = pack(
            {name: Tensor(0, shape, dtype) for name, dtype, shape in outputs}, memory.device
        )
        nbytes = self._in_bytes + self._out_bytes
        self._pinned, self._device = PinnedBuffer(nbytes), memory.allocate(nbytes)
        places |= {
            name: replace(place, pointer=self._in_bytes + place.pointer)
            for name, place in out_places.items()
        }
        self.on_device = {
            name: replace(p, pointer=self._device.pointer + p.pointer, owner=self._device)
            for name, p in places.items()
        }
        on_host = {
            name: replace(
                p, pointer=self._pinned.pointer + p.pointer, device=HOST, owner=self._pinned
            )
            for name, p in places.items()
        }
        self.inputs: dict[str, Array] = {name: on_host[name].storage() for name in inputs}
        self.outputs = {name: on_host[name] for name in out_places}
        for name, tensor in inputs.items():
            self.inputs[name][...] = tensor.storage()
        kinds = constant("cudaMemcpyKind")
        self._in, self._out = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost

    def upload(self, stream: int) -> None:
        """Enqueue a copy of all inputs to the device."""
        to, of = self._device.pointer, self._pinned.pointer
        call("cudaMemcpyAsync", to, of, self._in_bytes, self._in, stream)

    def download(self, stream: int) -> None:
        """Enqueue a copy of all outputs to the host."""
        to, of = (block.pointer + self._in_bytes for block in (self._pinned, self._device))
        call("cudaMemcpyAsync", to, of, self._out_bytes, self._out, stream)
