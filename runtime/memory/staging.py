"""Host-to-device copies through two pinned staging buffers."""

import contextlib
import ctypes
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from threading import Lock

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.cuda import Event, call, constant, on_device, try_call
from trt_lora.runtime.memory.tensor import Tensor


@dataclass(frozen=True)
class Piece:
    """Bytes of the host that follow one another, and where they go in a device buffer."""

    offset: int  # bytes from the start of the device buffer
    address: int  # on the host
    nbytes: int


def pieces_of(tensors: Mapping[str, Tensor], layout: Mapping[str, Tensor]) -> list[Piece]:
    """Return what to copy so that the tensors lie as in `layout`, a result of `pack`.

    Tensors that already lie so in one buffer, as those of a fitted adapter do, are one piece: the
    gaps between them are copied too. A gap is shorter than 256 bytes and ends where a tensor
    begins, so that it can be read wherever its tensors can.
    """
    pieces: list[Piece] = []
    owner: object = None
    for name, tensor in tensors.items():
        offset, nbytes = layout[name].pointer, tensor.nbytes
        if not nbytes:
            continue
        last = pieces[-1] if pieces and owner is tensor.owner else None
        if last and tensor.pointer - last.address == offset - last.offset:
            pieces[-1] = Piece(last.offset, last.address, offset - last.offset + nbytes)
        else:
            pieces.append(Piece(offset, tensor.pointer, nbytes))
        owner = tensor.owner
    return pieces


class Staging:
    """Two pinned buffers: one is filled while the device reads the other.

    Large adapters pass through in chunks, so that pinned memory does not grow with them. Threads
    may copy at the same time; they take turns by the chunk. The buffers are made when first
    needed, and freed when this object is closed or forgotten.
    """

    def __init__(self, device: int, chunk_bytes: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._slots: dict[int, _Slot] = {}
        self._lock = Lock()

    def copy(self, pieces: Iterable[Piece], target: int, stream: int) -> None:
        """Enqueue copies of `pieces` into the buffer of this GPU at address `target`.

        `stream` is of this GPU; for its default stream, the caller has made the GPU current.

        The host memory may change when this returns. The device has it when `stream` has passed:
        the caller waits for that, also when this raises.

        Raises:
            BackendError: the host is out of pinned memory, or the device is lost.
        """
        self._send(((piece, target) for piece in pieces), stream)

    def scatter(self, tensors: Mapping[int, Tensor], stream: int) -> None:
        """Enqueue copies of host tensors to addresses of this GPU, one for each; else as `copy`."""
        end, pieces = 0, list[tuple[Piece, int]]()
        for target, tensor in tensors.items():
            pieces.append((Piece(end, tensor.pointer, tensor.nbytes), target - end))
            end += tensor.nbytes
        self._send(pieces, stream)

    def close(self) -> None:
        """Free the pinned memory, once the device has read it."""
        for slot in self._slots.values():
            with contextlib.suppress(BackendError):  # a lost device reads nothing
                slot.copied.wait()
        self._slots.clear()

    def _slot(self, index: int) -> "_Slot":
        if index not in self._slots:
            with on_device(self._device):  # whose streams the event is for
                self._slots[index] = _Slot(self._chunk_bytes)
        return self._slots[index]

    def _send(self, pieces: Iterable[tuple[Piece, int]], stream: int) -> None:
        """Enqueue copies of pieces, each to its offset from an address, chunk by chunk."""
        size = self._chunk_bytes
        parts = ((part, target) for piece, target in pieces for part in _cut(piece, size))
        for index, chunk in groupby(parts, key=lambda part: part[0].offset // size):
            with self._lock:
                self._send_chunk(self._slot(index % 2), list(chunk), stream)

    def _send_chunk(self, slot: "_Slot", chunk: list[tuple[Piece, int]], stream: int) -> None:
        slot.copied.wait()  # the device may still read what was here
        try:
            _enqueue(slot.pointer, chunk, stream)
        except BaseException:
            with contextlib.suppress(BackendError):  # of the copies before the one that failed
                slot.copied.record(stream)
            raise
        slot.copied.record(stream)


def _enqueue(pinned: int, chunk: list[tuple[Piece, int]], stream: int) -> None:
    """Fill pinned memory and copy it, in one copy where pieces go to one buffer."""
    pinned -= chunk[0][0].offset
    kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
    for target, run in groupby(chunk, key=itemgetter(1)):
        parts = [part for part, _ in run]
        for part in parts:
            ctypes.memmove(pinned + part.offset, part.address, part.nbytes)
        start, end = parts[0].offset, parts[-1].offset + parts[-1].nbytes
        call("cudaMemcpyAsync", target + start, pinned + start, end - start, kind, stream)


class PinnedBuffer:
    """Pinned memory of the host, freed with this object; no copy may be pending then."""

    def __init__(self, nbytes: int) -> None:
        """Allocate.

        Raises:
            BackendError: the host is out of pinned memory.
        """
        self.pointer = int(call("cudaMallocHost", nbytes))
        weakref.finalize(self, try_call, "cudaFreeHost", self.pointer)


class _Slot(PinnedBuffer):
    """Pinned memory, and the event after which it may be written."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.copied = Event()


def _cut(piece: Piece, size: int) -> Iterator[Piece]:
    """Cut a piece where chunks of `size` bytes end."""
    start, end = piece.offset, piece.offset + piece.nbytes
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield Piece(start, piece.address + start - piece.offset, stop - start)
        start = stop
