"""`trt-lora serve` in processes of its own, and a client of it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.ports import free_port


@dataclass(frozen=True)
class Started:
    """A server in processes of its own."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    _log: Path

    @property
    def log(self) -> str:
        """What it has written on standard error so far."""
        return self._log.read_text()

    @property
    def engine(self) -> int:
        """The process of the engine."""
        (child,) = children(self.process.pid)
        return child

    def is_ready(self) -> bool:
        """Whether it has answered so."""
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False


def children(pid: int) -> list[int]:
    """The processes that a process's first thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@contextmanager
def started(*words: object, **environment: str) -> Iterator[Started]:
    """Run the command; kill what is left of it."""
    port = str(free_port())
    command = [sys.executable, "-m", "trt_lora.scripts.trt_lora_command", "serve"]
    with (
        # No pipe: nobody would read it while requests write their lines.
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(
            [*command, *map(str, words), "--port", port],
            env=os.environ | environment,
            stderr=log,
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            yield Started(process, client, Path(log.name))
        finally:
            process.kill()
