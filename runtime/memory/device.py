"""Device memory of one GPU: adapter uploads, per-step staging and outputs."""

from collections.abc import Mapping

from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.memory.cuda import call, constant, on_device, synchronized
from trt_lora.runtime.memory.host import ALIGNMENT, Blocks, Stream, in_buffer, pack
from trt_lora.runtime.memory.pool import DeviceBuffer, DevicePool
from trt_lora.runtime.memory.staging import Staging, pieces_of
from trt_lora.runtime.memory.tensor import HOST, Tensor

_MAX_PITCH = 2**31 - 1  # bytes between rows that CUDA takes in a copy of two dimensions


class CudaMemory:
    """Memory of one GPU, whichever is the calling thread's.

    `upload` and `zeros` make memory for adapters and the like, which every stream may use when
    they return. `stage` and `empty` make memory for one step, from a pool; a step that needs as
    much as an earlier one allocates nothing.
    """

    def __init__(
        self, index: int = 0, *, max_free_bytes: int = 512 << 20, staging_bytes: int = 8 << 20
    ) -> None:
        """Touch no GPU yet.

        Args:
            index: of the GPU.
            max_free_bytes: kept on the device in buffers that no tensor lies in; 0: none.
            staging_bytes: of each of two pinned buffers on the host.

        Raises:
            ConfigError: a size cannot work.
        """
        check_range("max_free_bytes", max_free_bytes, 0)
        check_range("staging_bytes", staging_bytes, ALIGNMENT)
        self.index, self.device = index, f"cuda:{index}"
        self._pool = DevicePool(index, max_free_bytes)
        self._staging = Staging(index, staging_bytes)

    def upload(self, tensors: Mapping[str, Tensor], stream: Stream = None) -> dict[str, Tensor]:
        """Move the host tensors into one device buffer of their own; wait for the copy.

        Tensors that lie in one host buffer as `pack` lays them out are copied as one range.

        Args:
            tensors: those that are on the device already are returned as they are.
            stream: CUDA stream of this GPU for the copy; its default stream if None.

        Raises:
            BackendError: the device is out of memory.
            TensorError: a tensor is on another GPU, or at an address that TensorRT does not take.
        """
        for name, tensor in tensors.items():
            self.check(name, tensor)
        host = {name: tensor for name, tensor in tensors.items() if tensor.device == HOST}
        if not host:
            return dict(tensors)
        nbytes, layout = pack(host, self.device)
        buffer = self._pool.allocate(nbytes)
        with on_device(self.index), synchronized(int(stream or 0)):
            self._staging.copy(pieces_of(host, layout), buffer.pointer, int(stream or 0))
        return dict(tensors) | in_buffer(layout, buffer.pointer, buffer)

    def stage(self, tensors: Mapping[str, Tensor], stream: int) -> dict[str, Tensor]:
        """Enqueue a copy of host tensors into one buffer of the pool, on a stream of this GPU.

        The tensors hold their values when `stream` has passed; until then the caller keeps them.

        Raises:
            BackendError: the device is out of memory.
        """
        nbytes, layout = pack(tensors, self.device)
        buffer = self._pool.take(nbytes)
        self._staging.copy(pieces_of(tensors, layout), buffer.pointer, stream)
        return in_buffer(layout, buffer.pointer, buffer)

    def zeros(self, nbytes: int, *, sparse: bool = False) -> Tensor:
        """Return `nbytes` bytes of zeros as a bool tensor [nbytes]; sparse ones take as much."""
        buffer = self._pool.allocate(nbytes)
        with on_device(self.index), synchronized(0):
            call("cudaMemsetAsync", buffer.pointer, 0, nbytes, 0)
        return Tensor(buffer.pointer, (nbytes,), "bool", self.device, buffer)

    def free_bytes(self) -> int:
        """Return how much of the GPU's memory is free now."""
        with on_device(self.index):
            free, _ = call("cudaMemGetInfo")
        return int(free)

    def write(self, tensors: Mapping[int, Tensor]) -> None:
        """Copy host tensors to addresses of the device, behind the default stream's work.

        The host waits for no more than pinned memory. Every run that begins later waits for the
        default stream, and one that is under way goes on meanwhile: nothing that it needs may lie
        at these addresses.

        Raises:
            BackendError: the host is out of pinned memory, or the device is lost.
        """
        with on_device(self.index):
            self._staging.scatter(tensors, 0)

    def copy(self, target: int, source: int, blocks: Blocks) -> None:
        """Copy blocks from address to address on the device, and wait; they do not overlap.

        It is one copy, but where the blocks lie further apart than CUDA takes.
        """
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToDevice
        width, pitch = blocks.nbytes, blocks.stride
        with on_device(self.index), synchronized(0):
            if 0 < pitch <= _MAX_PITCH:
                rows = blocks.count
                call("cudaMemcpy2DAsync", target, pitch, source, pitch, width, rows, kind, 0)
                return
            for offset in blocks.offsets:
                call("cudaMemcpyAsync", target + offset, source + offset, width, kind, 0)

    def clear(self, pointer: int, blocks: Blocks) -> None:
        """Write zeros to the blocks at an address of the device, and wait; see `copy`."""
        width, pitch = blocks.nbytes, blocks.stride
        with on_device(self.index), synchronized(0):
            if 0 < pitch <= _MAX_PITCH:
                call("cudaMemset2DAsync", pointer, pitch, 0, width, blocks.count, 0)
                return
            for offset in blocks.offsets:
                call("cudaMemsetAsync", pointer + offset, 0, width, 0)

    def empty(self, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return uninitialised tensors of these shapes and dtypes in one buffer of the pool."""
        nbytes, layout = pack(shapes, self.device)
        buffer = self._pool.take(nbytes)
        return in_buffer(layout, buffer.pointer, buffer)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return uninitialised memory of its own.

        Raises:
            BackendError: the device is out of memory.
        """
        return self._pool.allocate(nbytes)

    def check(self, name: str, tensor: Tensor) -> None:
        """Refuse a tensor on another GPU, or not aligned for TensorRT, with TensorError."""
        if tensor.device == HOST:
            return
        if tensor.device != self.device:
            raise TensorError(f"{name} is on {tensor.device}, the engine on {self.device}")
        if tensor.pointer % ALIGNMENT:
            raise TensorError(
                f"{name} is at address {tensor.pointer:#x}, which is no multiple of {ALIGNMENT}; "
                "pass a copy in memory of its own"
            )

    def close(self) -> None:
        """Give back everything that no tensor lies in, and later each buffer when it is free."""
        self._staging.close()
        self._pool.close()
