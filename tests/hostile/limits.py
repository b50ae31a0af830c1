"""Limits of time and memory for reading hostile files."""

import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile.targets import CONFIG, TARGETS, encoded, index_of, named, write
from support.adapters.manager_setup import manager_with

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.peft import INDEX_FILE
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.adapters.load import load_adapter

CONSTANT = 2 << 20  # bytes that a load may take whatever the size of the file
SECONDS = 5  # of processor time, for what takes milliseconds
TRACED = 4  # times as long where every allocation is written down
_WAITING = 20  # times as long on the clock of a busy machine


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail what takes more processor time, or hangs; other processes may slow this one down.

    The matching of a regular expression looks for signals too.
    """

    def stop(*_: object) -> None:
        raise AssertionError(f"still at work after {seconds} s")

    timers = [
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, seconds * _WAITING),
    ]
    before = [signal.signal(number, stop) for _, number, _ in timers]
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def assert_kept(kind: str, directory: Path, data: bytes) -> None:
    """The promise for one file: by the target, within the time and the memory."""
    with within(TRACED * SECONDS):
        assert_memory(lambda: TARGETS[kind](directory, data), len(data))


def assert_memory(call: Callable[[], object], size: int) -> None:
    """A call takes no more than twice the file and a constant."""
    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * size + CONSTANT, f"{peak} bytes for a file of {size}"


def assert_refused(path: Path, *messages: str) -> None:
    """Refused by a bound and by a new manager, in no time, with the path and the messages."""
    for bound in (True, False):
        with within(SECONDS), pytest.raises(AdapterError) as caught:
            manager_with(bound).load_weights("hostile", path)
        assert [text for text in (str(path), *messages) if text not in str(caught.value)] == []


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else encoded(header)
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], *offsets: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def loaded(path: Path) -> Adapter | None:
    """The adapter, None if it is refused by name; a target rule is asked for long paths too."""

    def call() -> Adapter:
        adapter = load_adapter(path)
        if adapter.targets is not None:
            for long in ("a" * 256, "." * 256):
                adapter.targets(long)
        return adapter

    found = named(path, call)
    return found if isinstance(found, Adapter) else None


def sharded(directory: Path, *names: object) -> Path:
    return write(directory, {CONFIG_FILE: encoded(CONFIG), INDEX_FILE: encoded(index_of(*names))})
