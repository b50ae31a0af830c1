"""A child process that answers in lines of JSON; whatever else it prints is in a log.

Of the standard library alone: a child may run in an interpreter that has none of our packages.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

_FAREWELL_SECONDS = 2.0


class ChildProcess:
    """The parent's side."""

    def __init__(self, command: Sequence[object], log: Path, path: Sequence[object]) -> None:
        """Start it in a process group of its own, and wait for nothing.

        Args:
            command: its words.
            log: file for what it and its libraries print.
            path: folders that it imports from.

        Raises:
            OSError: it cannot be started.
        """
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        self._log, self._unread = log, b""
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait a moment, then end the process, and with it all that it started."""
        for pipe in (self._commands, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if not self._ends():
            self._process.send_signal(signal.SIGABRT)  # it may write down where it is
            self._ends()
        with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ends(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_SECONDS)
        return self._process.returncode is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line."""
        with contextlib.suppress(BrokenPipeError):  # reading tells of its end
            self._commands.write(json.dumps(message).encode() + b"\n")
            self._commands.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """Read one line.

        Raises:
            TimeoutError: there was none in time.
            EOFError: the process has ended.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            read = os.read(self._answers.fileno(), 1 << 20)
            if not read:
                raise EOFError("its process ended")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""
        return self._process.pid

    @property
    def ending(self) -> str:
        """The signal or status with which it ended."""
        code = self._process.returncode or 0
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def last_lines(self, count: int) -> list[str]:
        """Return the end of the log."""
        return self._log.read_text(errors="replace").strip().splitlines()[-count:]


def parent() -> Callable[[Mapping[str, Any]], None]:
    """Return what a child answers with; all that is printed from now on goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message, default=str), file=answers, flush=True)


def imported(place: str) -> Any:
    """Return what is at MODULE:NAME."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
