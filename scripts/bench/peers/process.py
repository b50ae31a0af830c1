"""The runner's side of a peer's process: start, ask, end."""

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trt_lora.scripts.bench.peers.peer_list import PeerEntry

_WORKER = "trt_lora.scripts.bench.peers.worker"


class PeerError(RuntimeError):
    """A peer cannot be measured; the message is what its row says."""


@dataclass(frozen=True)
class PeerAnswer:
    """What one answer took, and its tokens, by row."""

    prompt: float  # seconds
    decode: float  # seconds
    tokens: list[list[int]]


class PeerProcess:
    """A peer in an interpreter of its own; it takes commands one at a time."""

    def __init__(
        self, entry: PeerEntry, python: Path, setup: dict[str, Any], path: Path, log: Path
    ) -> None:
        """Start it, and wait for nothing.

        Args:
            entry: which peer.
            python: its interpreter.
            setup: what it loads, as JSON of `peer.Setup`.
            path: folder of the package `trt_lora`.
            log: what it prints goes there.

        Raises:
            PeerError: the interpreter cannot be started.
        """
        command = [python, "-m", _WORKER, entry.place, json.dumps(setup), *entry.packages]
        self._log = log
        try:
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    env=os.environ | {"PYTHONPATH": str(path)},
                )
        except OSError as error:
            raise PeerError(f"not installed: {python} cannot be started: {error}") from error
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close() if pipe else None

    def versions(self, seconds: float) -> dict[str, str]:
        """Wait until it is loaded; return the versions of its packages.

        Raises:
            PeerError: it cannot load, or not in time.
        """
        found: dict[str, str] = self._receive(seconds)["versions"]
        return found

    def ask(self, ids: list[list[int]], steps: int, seconds: float) -> PeerAnswer:
        """Have prompts [rows][seq] answered with `steps` tokens after the first.

        Raises:
            PeerError: it failed, or did not answer in time.
        """
        assert self._process.stdin is not None  # it is a pipe
        with contextlib.suppress(BrokenPipeError):  # reading tells of its end
            self._process.stdin.write(json.dumps({"ids": ids, "steps": steps}).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._receive(seconds)
        return PeerAnswer(answer["prompt"], answer["decode"], answer["tokens"])

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Read one line."""
        assert self._process.stdout is not None  # it is a pipe
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerError(f"no answer within {seconds:.0f} s")
            read = os.read(self._process.stdout.fileno(), 1 << 20)
            if not read:
                raise PeerError(f"its process ended: {self._last_words()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-400:] or "without a word"
