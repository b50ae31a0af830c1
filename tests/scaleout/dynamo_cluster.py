"""DynamoCluster: Dynamo's front end and workers over an engine, in processes on loopback."""

import json
import os
import secrets
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from scaleout.hanging_worker import HANGS
from support.eventually import eventually
from support.ports import free_port

_PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
_LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
BASE = "base"


class DynamoCluster:
    """A front end, and a worker for each folder of adapters; all end with the block."""

    def __init__(self, folder: Path, engine: str, loras: Sequence[Path], *words: str) -> None:
        """Take what the workers serve, and options of theirs."""
        self._folder, self._engine, self._loras, self._words = folder, engine, loras, words
        folder.mkdir()
        (folder / "keys").mkdir()
        self.port, self._system = free_port(), [_low_port() for _ in loras]
        self._front: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start all, and wait until the front end answers for both."""
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End all, by force what does not by itself."""
        processes = [p for p in (self._front, *self.workers) if p is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start_all(self) -> None:
        self.start_front()
        self.workers = [self._start_worker(number) for number in range(len(self._loras))]
        ports = [self.port, *self._system]
        assert eventually(lambda: BASE in self.models()), self.log
        assert eventually(lambda: all(map(_is_healthy, ports))), self.log

    @property
    def address(self) -> str:
        """Of the front end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What all have written last."""
        texts = [f"{p.name}:\n{p.read_text()[-3000:]}" for p in sorted(self._folder.glob("*.log"))]
        return "\n".join(texts)

    def start_front(self) -> None:
        """Start the front end, in the place of one that has been ended."""
        self.end_front()
        words = ["--http-host", "127.0.0.1", "--http-port", str(self.port), *_PLANES]
        self._front = self._start("front", ["-m", "dynamo.frontend", *words], {})

    def end_front(self) -> None:
        """End the front end as a crash would."""
        if self._front is not None:
            self._front.kill()
            self._front.wait()

    @contextmanager
    def hanging(self, number: int) -> Iterator[None]:
        """Let the engine of a worker make no step until the end of the block."""
        hangs = Path(HANGS.format(self._system[number]))
        hangs.touch()
        try:
            yield
        finally:
            hangs.unlink()

    def is_healthy(self, number: int) -> bool:
        """Whether a worker says that it is well."""
        return _is_healthy(self._system[number])

    def restart_worker(self, number: int) -> None:
        """Start a worker in the place of one that hangs."""
        self.workers[number].kill()
        self.workers[number].wait()
        self.workers[number] = self._start_worker(number)
        assert eventually(lambda: self.is_healthy(number)), self.log

    def models(self) -> list[str]:
        """The names that the front end lists."""
        try:
            with urllib.request.urlopen(f"{self.address}/v1/models", timeout=20) as answer:
                return [model["id"] for model in json.load(answer)["data"]]
        except OSError:
            return []

    def load(self, worker: int, name: str) -> tuple[int, dict[str, Any]]:
        """Tell a worker to load an adapter; return the status and the answer."""
        source = {"uri": f"file://{self._loras[worker] / name}"}
        return self._told(worker, "POST", "", {"lora_name": name, "source": source})

    def unload(self, worker: int, name: str) -> tuple[int, dict[str, Any]]:
        """Tell a worker to unload an adapter."""
        return self._told(worker, "DELETE", f"/{name}", None)

    def metric(self, worker: int, name: str) -> float:
        """Return a metric of a worker."""
        with urllib.request.urlopen(self._at(worker, "/metrics"), timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def _told(self, worker: int, method: str, path: str, body: object) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        url = self._at(worker, f"/v1/loras{path}")
        json_type = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url, data, json_type, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def _at(self, worker: int, path: str) -> str:
        return f"http://127.0.0.1:{self._system[worker]}{path}"

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        command = ["-m", "scaleout.hanging_worker", self._engine, *_PLANES, *self._words]
        command += ["--served-model-name", BASE, "--lora-dir", str(self._loras[number])]
        environment = {"DYN_SYSTEM_PORT": str(self._system[number]), "DYN_LORA_ENABLED": "true"}
        environment |= {"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_CANARY_WAIT_TIME": "2"}
        environment["DYN_HEALTH_CHECK_REQUEST_TIMEOUT"] = "2"
        return self._start(f"worker-{number}", command, environment)

    def _start(
        self, name: str, words: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        settings = dict.fromkeys((*_LOOPBACK, "DYN_SYSTEM_HOST"), "127.0.0.1")
        settings |= {"DYN_FILE_KV": str(self._folder / "keys"), "HF_HUB_OFFLINE": "1"}
        settings |= {
            "DYN_LOG": "error",
            "HOME": str(self._folder),
            "DYN_LORA_PATH": str(self._folder / "cache"),
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | settings | environment,
                stdout=log,
                stderr=log,
            )


def _low_port() -> int:
    """Return a free port of 15 bits: Dynamo reads the system's port as a number with a sign."""
    while True:
        port = secrets.choice(range(20_000, 1 << 15))
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
