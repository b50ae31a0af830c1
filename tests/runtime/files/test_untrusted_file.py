"""Files that are read piece by piece: each piece in memory that nothing else writes to."""

import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.untrusted_file import AdapterFile, Bytes, ReadBuffer, _may_have_writer

CONTENT = bytes(range(256)) * 64


def file_of(directory: Path) -> AdapterFile:
    path = directory / "file"
    path.write_bytes(CONTENT)
    return AdapterFile(path)


def expected(start: int, size: int) -> Bytes:
    return np.frombuffer(CONTENT[start : start + size], np.uint8)


def test_a_piece_is_what_the_file_holds_there(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert file.size == len(CONTENT)
    for start, size in [(0, 10), (7, 300), (len(CONTENT), 0), (0, len(CONTENT))]:
        np.testing.assert_array_equal(file.read(start, size), expected(start, size))


def test_what_is_held_is_never_written_to_by_a_later_read(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    whole = file.read(0, 1000)
    part = file.read(1, 1000)[10:20].view(np.uint16)  # the array it is a view of is gone
    turned = file.read(2, 1000).reshape(10, 100).T
    file.read(3, 1000)
    np.testing.assert_array_equal(whole, expected(0, 1000))
    np.testing.assert_array_equal(part, expected(11, 10).view(np.uint16))
    np.testing.assert_array_equal(turned, expected(2, 1000).reshape(10, 100).T)


def test_the_memory_of_a_scratch_is_used_again_and_no_other(tmp_path: Path) -> None:
    file, buffer = file_of(tmp_path), ReadBuffer()
    own = file.read(3, 1000)
    first = file.read(0, 1000, buffer)
    again = file.read(5, 900, buffer)
    np.testing.assert_array_equal(again, expected(5, 900))
    assert again.ctypes.data == first.ctypes.data
    np.testing.assert_array_equal(file.read(1, 5000, buffer), expected(1, 5000))
    np.testing.assert_array_equal(own, expected(3, 1000))


def test_several_threads_may_read_at_once(tmp_path: Path) -> None:
    file, wrong = file_of(tmp_path), []

    def read(start: int) -> None:
        pieces = (file.read(start, 500) for _ in range(300))
        if not all(np.array_equal(piece, expected(start, 500)) for piece in pieces):
            wrong.append(start)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, 4000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(("start", "size"), [(-1, 5), (0, -1), (0, 1 << 40), (len(CONTENT), 1)])
def test_a_piece_beyond_the_file_is_refused(tmp_path: Path, start: int, size: int) -> None:
    with pytest.raises(AdapterError, match=r"file has 16384 bytes, but bytes"):
        file_of(tmp_path).read(start, size)


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    (tmp_path / "file").write_bytes(CONTENT[:100])
    with pytest.raises(AdapterError, match="was changed while it was read"):
        file.read(0, 1000)


# ------------------------------------------------------------------------------------ other writers


def assert_changed(file: AdapterFile) -> None:
    with pytest.raises(AdapterError, match="was changed while it was read; load it again"):
        file.read(0, 1000)


def told(path: Path) -> bool:
    with path.open("rb") as file:
        return _may_have_writer(file.fileno())


def test_a_writer_is_seen_until_it_closes_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path).path
    assert not told(path)
    with path.open("r+b") as stream:
        assert told(path)
        memory = mmap.mmap(stream.fileno(), 0)
    with memory:
        assert told(path)
    with path.open("rb"):
        assert not told(path)


def test_the_lease_is_given_back(tmp_path: Path) -> None:
    with file_of(tmp_path).path.open("rb") as file:
        assert not _may_have_writer(file.fileno())
        # It fails where there is a lease.
        os.close(os.open(file.name, os.O_WRONLY | os.O_NONBLOCK))


def write_in_pauses(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """Let each pause of a reader end with the next step of a writer, however slow the machine."""
    sleep, left = time.sleep, list(steps)

    def pause(seconds: float) -> None:
        sleep(seconds)
        if left:
            left.pop(0)()

    monkeypatch.setattr(time, "sleep", pause)


def test_a_file_that_is_soon_complete_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(len(CONTENT)))
    stream = path.open("r+b")
    write_in_pauses(monkeypatch, lambda: stream.write(CONTENT), stream.close)
    file = AdapterFile(path)
    np.testing.assert_array_equal(file.read(0, len(CONTENT)), expected(0, len(CONTENT)))


def test_a_writer_that_pauses_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, half = tmp_path / "file", len(CONTENT) // 2
    path.write_bytes(bytes(len(CONTENT)))
    with path.open("r+b", buffering=0) as stream:
        halves = [partial(stream.write, CONTENT[start : start + half]) for start in (0, half)]
        write_in_pauses(monkeypatch, *halves)
        file = AdapterFile(path)
    np.testing.assert_array_equal(file.read(0, len(CONTENT)), expected(0, len(CONTENT)))


def test_a_file_that_is_written_to_all_the_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("r+b", buffering=0) as stream:
        write_in_pauses(monkeypatch, *[partial(stream.write, b"x")] * 99)
        with pytest.raises(AdapterError, match="is being written to; load it again"):
            AdapterFile(path)


def test_a_file_that_is_written_to_at_once_is_refused(tmp_path: Path) -> None:
    for _ in range(20):
        file = file_of(tmp_path)
        file.path.write_bytes(CONTENT[::-1])  # of the same size
        assert_changed(file)


def test_a_file_that_is_written_to_and_dated_back_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    before = file.path.stat()
    file.path.write_bytes(CONTENT[::-1])
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_changed(file)


def test_a_file_that_is_written_to_through_memory_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    with file.path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        memory[:10] = bytes(10)
        assert_changed(file)


def test_a_file_that_is_linked_or_removed_is_read_to_its_end(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    (tmp_path / "another").hardlink_to(file.path)
    np.testing.assert_array_equal(file.read(5, 10), expected(5, 10))
    (tmp_path / "another").unlink()
    file.path.unlink()
    np.testing.assert_array_equal(file.read(5, 10), expected(5, 10))
