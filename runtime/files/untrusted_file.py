"""Untrusted adapter files: confined to their directory, and refused if changed during a read.

What is promised: all pieces are of one version, the one that the file had when it was opened, or
there is an error. A file that is written to at that moment is waited for, a little while. A file
that is replaced or removed meanwhile is read to its end. A writer that overwrites a file in place
and pauses for a fifth of a second halfway can pass for one that has finished.

Reading instead of mapping: a mapped file that somebody truncates ends the process with a signal,
and its pages count as memory of the process.
"""

import fcntl
import io
import os
import signal
import stat
import time
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.memory.dtypes import Array

_POINTER = b"version https://git-lfs.github.com/"
_LARGEST_POINTER = 1024  # bytes, by its specification

_TICK_NS = 10_000_000  # of the clock of files, at the most
_QUIET_NS = 200_000_000  # without a change, where there may be a writer
_TICKS = 30  # that a file may take to be written, once it is opened


Bytes = npt.NDArray[np.uint8]


class ReadBuffer:
    """Keeps the largest memory asked for; for one thread, and for one array at a time.

    A fresh allocation costs as much as the read.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        """Return `size` bytes, those of the call before among them."""
        if self._memory.size < size:
            self._memory = np.empty(0, np.uint8)  # let go first
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


class Reader(Protocol):
    """Reads an array."""

    def __call__(self, buffer: ReadBuffer | None = None) -> Array:
        """Return the array: in memory of its own, or, where there is a buffer, perhaps there."""
        ...


class AdapterFile:
    """An open file; reads are safe from several threads.

    Raises:
        AdapterError: there is no such file, it is a pipe, a device or a directory, it is being
            written to, or is a pointer that Git LFS left in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        weakref.finalize(self, self._file.close)
        self._opened = self._settled()
        self.size = self._opened.st_size
        if self.size < _LARGEST_POINTER and self.read(0, self.size).tobytes().startswith(_POINTER):
            raise AdapterError(
                f"{path} is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
            )

    def read(self, start: int, size: int, buffer: ReadBuffer | None = None) -> Bytes:
        """Return `size` bytes from `start`, in memory of their own or in the buffer's.

        Raises:
            AdapterError: the file ends before, or was written to since it was opened.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise AdapterError(
                f"{self.path} has {self.size} bytes, but bytes {start} to {start + size} are "
                "asked for: it is damaged; copy or save the adapter again"
            )
        data = buffer.take(size) if buffer else np.empty(size, np.uint8)
        view, done = data.data, 0
        descriptor = self._file.fileno()
        while done < size and (count := os.preadv(descriptor, [view[done:]], start + done)):
            done += count
        if done < size or not self._is_as_opened():
            raise AdapterError(f"{self.path} was changed while it was read; load it again")
        return data

    def _settled(self) -> os.stat_result:
        """The state of the file, once any later change to it is sure to make another state.

        The clock of files ticks: two changes within one tick leave the same time.
        """
        for _ in range(_TICKS):
            quiet = _QUIET_NS if _may_have_writer(self._file.fileno()) else _TICK_NS
            state = os.fstat(self._file.fileno())
            age = time.time_ns() - state.st_mtime_ns  # negative where another clock made the time
            if abs(age) > quiet:
                return state
            time.sleep(_TICK_NS / 1e9)
        raise AdapterError(f"{self.path} is being written to; load it again when that is done")

    def _is_as_opened(self) -> bool:
        before, now = self._opened, os.fstat(self._file.fileno())
        are_times = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
        # ctime shows a writer that sets the old time again; it changes with the number of links too
        return are_times and (
            before.st_ctime_ns == now.st_ctime_ns or before.st_nlink != now.st_nlink
        )


def _may_have_writer(descriptor: int) -> bool:
    """Whether Linux refuses a lease for reading, as it does while a file is open for writing.

    It grants one to the owner of the file and to root, on file systems of this machine.
    """
    try:
        # Whoever opens the file before the lease is given back makes a signal, of which the usual
        # one would end this process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (AttributeError, OSError):  # not Linux; another's file; one that is written to
        return True
    return False


def _open(path: Path) -> io.FileIO:
    try:
        # Looked at first, for opening a pipe would wait for its other end.
        is_regular = stat.S_ISREG(path.stat().st_mode)
        file = io.FileIO(path) if is_regular else None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be opened: {error}") from error
    if file is None:
        raise AdapterError(f"{path} is not a regular file")
    return file


def file_inside(directory: Path, name: str) -> Path:
    """Return the path of `name` in `directory`, wherever `directory` itself lies.

    A link may lead to another place of the directory, and, in the cache of the Hugging Face hub,
    from anywhere in `snapshots/<revision>` to `blobs`, which holds the files' contents.

    Raises:
        AdapterError: the name leads out of the directory: absolute, `..`, or a link.
    """
    path = directory / name
    try:
        home, target = directory.resolve(), path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a link to itself, a zero byte
        raise AdapterError(f"{directory}: {name!r:.200} is not a file name: {error}") from error
    revisions = (place for place in (home, *home.parents) if place.parent.name == "snapshots")
    homes = [home, *(revision.parent.parent / "blobs" for revision in revisions)]
    if Path(name).is_absolute() or not any(target.is_relative_to(place) for place in homes):
        raise AdapterError(
            f"{directory}: {name!r:.200} leads out of the adapter's directory, to {target}; "
            "put the file itself into the directory"
        )
    return path
