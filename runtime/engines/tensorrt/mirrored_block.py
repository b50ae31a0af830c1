"""Inputs and outputs of a run in one device block, and in two pinned blocks laid out alike."""

from collections.abc import Mapping

from trt_lora.runtime.memory.cuda import call, constant
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import in_buffer, pack
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
        outputs: Mapping[str, Tensor],
        *,
        scratch: Mapping[str, Tensor],
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
        nbytes, layout = pack({**inputs, **outputs, **scratch}, memory.device)
        device = memory.allocate(nbytes)
        self.on_device = in_buffer(layout, device.pointer, device)
        self.mirrors = tuple(Mirror(device.pointer, inputs, outputs) for _ in range(2))


class Mirror:
    """A pinned block, and the copies between it and the device block."""

    def __init__(
        self, device: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        """Allocate.

        Args:
            device: address of the device block, which begins with the same layout.
            inputs: what is written here; two or more.
            outputs: what there is else.

        Raises:
            BackendError: the host is out of pinned memory.
        """
        self._in_bytes, _ = pack(inputs, HOST)
        nbytes, layout = pack({**inputs, **outputs}, HOST)
        self._device, self._out_bytes = device, nbytes - self._in_bytes
        self._pinned = PinnedBuffer(nbytes)
        tensors = in_buffer(layout, self._pinned.pointer, self._pinned)
        self.inputs: dict[str, Array] = {name: tensors[name].storage() for name in inputs}
        self.outputs = {name: tensors[name] for name in outputs}
        for name, tensor in inputs.items():
            self.inputs[name][...] = tensor.storage()
        self._behind_first = layout[[*inputs][1]].pointer
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
