"""Size-class free lists for device memory; reuses the lowest address first."""

import contextlib
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from threading import Lock
from typing import TypeVar

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.cuda import call, on_device, try_call
from trt_lora.runtime.memory.host import ALIGNMENT

_Made = TypeVar("_Made")
_Free = OrderedDict[int, list[int]]  # heap of addresses by size; sizes in the order of their use
_Returned = deque[tuple[int, int]]  # address and size


class DeviceBuffer:
    """Memory of a GPU for any of its streams, freed when the last tensor in it is gone.

    Whoever enqueues work on the memory waits for the work before letting go of it.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        self.pointer = _allocate(device, nbytes)
        weakref.finalize(self, _free, device, self.pointer)


class PooledBuffer:
    """Memory of a pool, returned to it when the last tensor in it is gone."""

    def __init__(self, pool: "DevicePool", pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        weakref.finalize(self, pool.give_back, pointer, nbytes)


class DevicePool:
    """Buffers by size class; of those that are free, the one with the lowest address goes first.

    So a generation that does what another did gets the same addresses, on which CUDA graphs
    depend. (Last in, first out would not do: a decoder alternates between two buffers, and after
    an even number of steps the next generation would begin with the other one.)

    Finalizers give buffers back from any thread and in the middle of anything, this class
    included; so they only append to a deque, and whoever holds the lock sorts them in.

    At all times: the buffers that were allocated here are those in use, those returned and not
    sorted in, and those free; the last are `free_bytes` in all.
    """

    def __init__(self, device: int, max_free_bytes: int) -> None:
        """Allocate on the GPU `device`, whichever is the calling thread's.

        At most `max_free_bytes` are kept; of what is more, the size not used longest goes. What is
        free when the pool is forgotten is given back to the driver.
        """
        self.free_bytes = 0
        self._device = device
        self._limit = max_free_bytes
        self._free: _Free = OrderedDict()
        self._returned: _Returned = deque()
        self._lock = Lock()
        weakref.finalize(self, _free_all, device, self._free, self._returned)

    def take(self, nbytes: int) -> PooledBuffer:
        """Return a buffer of at least `nbytes`, with whatever its last user left in it.

        Raises:
            BackendError: the device is out of memory.
        """
        size = size_class(nbytes)
        with self._sorted():
            pointer = self._pop(size, heappop) if size in self._free else None
        if pointer is None:
            pointer = self._retried(lambda: _allocate(self._device, size))
        return PooledBuffer(self, pointer, size)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return a buffer of its own, of just `nbytes`: for what lives long, as adapters do.

        Raises:
            BackendError: the device is out of memory.
        """
        return self._retried(lambda: DeviceBuffer(self._device, nbytes))

    def give_back(self, pointer: int, nbytes: int) -> None:
        """Take back a buffer on which no work is pending; only finalizers call this."""
        self._returned.append((pointer, nbytes))
        self._settle()

    def trim(self) -> bool:
        """Give all free buffers back to the driver; return whether there were any."""
        with self._sorted():
            found = bool(self.free_bytes)
            self._drop_to(0)
        return found

    def close(self) -> None:
        """Keep nothing from now on; buffers in use go to the driver when they are released."""
        self._limit = 0
        self.trim()

    def _retried(self, make: Callable[[], _Made]) -> _Made:
        """Allocate with `make`; on failure, trim the free lists and retry once."""
        try:
            return make()
        except BackendError:
            if not self.trim():
                raise
        return make()

    @contextlib.contextmanager
    def _sorted(self) -> Iterator[None]:
        """Hold the lock, with everything that was returned sorted in."""
        with self._lock:
            self._sort_in()
            yield
        self._settle()

    def _settle(self) -> None:
        """Sort in what was returned, unless somebody holds the lock, who then does so."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            pointer, size = self._returned.popleft()
            heappush(self._free.setdefault(size, []), pointer)
            self._free.move_to_end(size)
            self.free_bytes += size
        self._drop_to(self._limit)

    def _drop_to(self, limit: int) -> None:
        while self.free_bytes > limit:
            # The last of a heap: what is left is a heap.
            _free(self._device, self._pop(next(iter(self._free)), list.pop))

    def _pop(self, size: int, pop: Callable[[list[int]], int]) -> int:
        self._free.move_to_end(size)
        pointer = pop(self._free[size])
        self.free_bytes -= size
        if not self._free[size]:
            del self._free[size]
        return pointer


def size_class(nbytes: int) -> int:
    """Return the size that is allocated for `nbytes`: at most a quarter more, 256 at least.

    With four sizes between a power of two and the next, a cache that grows by a token a step needs
    a new size once in many steps.
    """
    step = 1 << max(nbytes.bit_length() - 3, ALIGNMENT.bit_length() - 1)
    return max(-(-nbytes // step), 1) * step


def _allocate(device: int, nbytes: int) -> int:
    with on_device(device):
        pointer = int(call("cudaMallocAsync", max(nbytes, ALIGNMENT), 0))
        try:
            call("cudaStreamSynchronize", 0)  # until then the memory is there for stream 0 only
        except BaseException:
            try_call("cudaFreeAsync", pointer, 0)
            raise
    return pointer


def _free(device: int, pointer: int) -> None:
    with on_device(device, try_call):  # any thread's: garbage is collected wherever
        try_call("cudaFreeAsync", pointer, 0)


def _free_all(device: int, free: _Free, returned: _Returned) -> None:
    for pointer in [*(p for heap in free.values() for p in heap), *(p for p, _ in returned)]:
        _free(device, pointer)
