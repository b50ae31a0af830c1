"""The runner's side of a peer's process: start, ask, end."""

import json
from pathlib import Path
from typing import Any

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows
from trt_lora.scripts.bench.peers.peer_list import PeerEntry
from trt_lora.scripts.measuring.child import ChildProcess

_WORKER = "trt_lora.scripts.bench.peers.worker"


class PeerError(RuntimeError):
    """A peer cannot be measured; the message is what its row says."""


class PeerProcess(ChildProcess):
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
        try:
            super().__init__(command, log, [path])
        except OSError as error:
            raise PeerError(f"not installed: {python} cannot be started: {error}") from error

    def versions(self, seconds: float) -> dict[str, str]:
        """Wait until it is loaded; return the versions of its packages.

        Raises:
            PeerError: it cannot load, or not in time.
        """
        found: dict[str, str] = self._answer(seconds)["versions"]
        return found

    def ask(self, ids: Rows, steps: int, seconds: float) -> PeerAnswer:
        """Have prompts [rows][seq] answered with `steps` tokens after the first.

        Raises:
            PeerError: it failed, or did not answer in time.
        """
        self.send({"ids": ids, "steps": steps})
        return PeerAnswer(**self._answer(seconds))

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self.receive(seconds)
        except TimeoutError as error:
            raise PeerError(str(error)) from error
        except EOFError as error:
            last_words = " / ".join(self.last_lines(3))[-400:] or "without a word"
            raise PeerError(f"{error}: {last_words}") from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer
