"""Ctrl-C and SIGTERM, known as such where a library makes another exception of them."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATED = 143  # what a shell says of SIGTERM, which `timeout`, `docker stop` and CI send
_SECONDS = 0.01  # until an interrupt that was lost comes again: finalizers are short


class Terminated(SystemExit):
    """SIGTERM came: what is half written is removed on the way out, as on Ctrl-C."""


class NotedInterrupt:
    """Python's handler of Ctrl-C; true once it was called."""

    def __init__(self) -> None:
        """Begin."""
        self._pressed = False

    def __bool__(self) -> bool:
        """Return whether it was called."""
        return self._pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt."""
        self._pressed = True
        signal.default_int_handler(number, frame)


@contextmanager
def noted_interrupts() -> Iterator[NotedInterrupt]:
    """Yield what handles Ctrl-C while the block runs, unless it is ignored.

    One that comes while modules are imported may be seen as another exception: numpy raises an
    ImportError for it, Python 3.11 a RuntimeError where a class was being made. One that comes in a
    finalizer, which Python prints and forgets, comes again.
    """
    noted = NotedInterrupt()
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def unraisable(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:
            threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            hook(lost)

    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, noted)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` while the block runs, where it would end the process.

    Where a library catches that, the block ends with it. Signals are the main thread's: in another
    nothing changes.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came: list[Terminated] = []

    def terminate(number: int, frame: object) -> NoReturn:
        came.append(Terminated(TERMINATED))
        raise came[-1]

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Exception:
        if not came:
            raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if came:
        raise came[-1]
