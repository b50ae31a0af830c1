"""Inputs and outputs of a run in one device block, and in two pinned blocks laid out alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trt_lora.runtime.engines.tensorrt.output_shapes import TensorShape
from trt_lora.runtime.memory.cuda import call, constant
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import pack
from trt_lora.runtime.memory.staging import PinnedBuffer
from trt_lora.runtime.memory.tensor import HOST, Tensor


class MirroredBlock:
    """Inputs first, then outputs: each way one copy moves all of them. Scratch has no mirror.

    The pinned blocks are for runs in turns: what one has brought to the host stays during the next.
    A copy is waited for before the next of that mirror, and before the block is let go of.
    """

    def __init__(
        self,
        memory: CudaMemory,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[TensorShape],
        *,
        scratch: Sequence[TensorShape],
    ) -> None:
        """Allocate all blocks, and write the inputs to the pinned ones.

        Args:
            memory: of the GPU, which is current.
            inputs: on the host.
            outputs: of the run, that come to the host.
            scratch: what the run writes beside them.

        Raises:
            BackendError: the device or the host is out of memory.
        """
        parts = (inputs, _unplaced(outputs), _unplaced(scratch))
        places, nbytes, ends = dict[str, Tensor](), 0, list[int]()
        for part in parts:
            size, found = pack(part, memory.device)
            places |= {
                name: replace(place, pointer=nbytes + place.pointer)
                for name, place in found.items()
            }
            nbytes += size
            ends.append(nbytes)
        device = memory.allocate(nbytes)
        self.on_device = {
            name: replace(place, pointer=device.pointer + place.pointer, owner=device)
            for name, place in places.items()
        }
        self.mirrors = tuple(
            Mirror(device.pointer, places, inputs, parts[1], (ends[0], ends[1])) for _ in range(2)
        )


class Mirror:
    """A pinned block, and the copies between it and the device block."""

    def __init__(
        self,
        device: int,
        places: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        ends: tuple[int, int],
    ) -> None:
        """Allocate.

        Args:
            device: address of the device block.
            places: offset of every tensor in it.
            inputs: what is written here.
            outputs: what there is else.
            ends: of the inputs and of the outputs, in bytes.

        Raises:
            BackendError: the host is out of pinned memory.
        """
        self._device, (self._in_bytes, end) = device, ends
        self._out_bytes, self._pinned = end - self._in_bytes, PinnedBuffer(end)
        tensors = {
            name: replace(
                places[name],
                pointer=self._pinned.pointer + places[name].pointer,
                device=HOST,
                owner=self._pinned,
            )
            for name in (*inputs, *outputs)
        }
        self.inputs: dict[str, Array] = {name: tensors[name].storage() for name in inputs}
        self.outputs = {name: tensors[name] for name in outputs}
        for name, tensor in inputs.items():
            self.inputs[name][...] = tensor.storage()
        second = [*inputs][1:2]
        self._behind_first = places[second[0]].pointer if second else self._in_bytes
        kinds = constant("cudaMemcpyKind")
        self._in, self._out = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost

    def upload(self, stream: int, *, without_first: bool = False) -> None:
        """Enqueue a copy of all inputs to the device, or of all but the first."""
        start = self._behind_first if without_first else 0
        to, of = self._device + start, self._pinned.pointer + start
        call("cudaMemcpyAsync", to, of, self._in_bytes - start, self._in, stream)

    def download(self, stream: int) -> None:
        """Enqueue a copy of all outputs to the host."""
        to, of = self._pinned.pointer + self._in_bytes, self._device + self._in_bytes
        call("cudaMemcpyAsync", to, of, self._out_bytes, self._out, stream)


def _unplaced(shapes: Sequence[TensorShape]) -> dict[str, Tensor]:
    return {name: Tensor(0, shape, dtype) for name, dtype, shape in shapes}
