"""Prefetcher: a background thread that brings adapters nearer, in the order of asking."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.store.entry import Entry
from trt_lora.runtime.store.levels import Levels


class Prefetcher:
    """Loads that nothing waits for; the thread begins with the first one."""

    def __init__(self, levels: Levels) -> None:
        """Begin without a thread."""
        self._levels = levels
        self._thread: ThreadPoolExecutor | None = None
        self._futures: dict[Entry, Future[None]] = {}

    def submit(self, entry: Entry) -> Future[None]:
        """Bring an adapter into memory, and into a slot that is not held; under the store's lock.

        An adapter that is on its way has one future.
        """
        if entry in self._futures:
            return self._futures[entry]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="trt-lora-prefetch")
        future = self._futures[entry] = self._thread.submit(self._load, entry)
        entry.moving += 1  # until the future ends, so that it is not evicted before its turn
        future.add_done_callback(lambda _: self._end(entry))
        return future

    def close(self) -> None:
        """Drop what waits, and end the thread."""
        with self._levels.lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def _load(self, entry: Entry) -> None:
        self._levels.to_memory(entry)
        with suppress(StateError):  # all slots are held
            self._levels.to_device(entry)

    def _end(self, entry: Entry) -> None:
        """Forget a load that has ended, or was cancelled."""
        with self._levels.lock:
            self._futures.pop(entry, None)
            self._levels.stop_moving(entry)
        self._levels.notify()
