"""What a server is tested with: the tiny engine with words, and one that waits to be let."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.eventually import SECONDS, eventually
from support.fakes.fake_engine import write_peft
from support.fakes.gated_engine import GatedEngine
from support.fakes.slot_engine import number_file
from support.web_server import COMPLETIONS, Web, web_server

from trt_lora.runtime import Engine
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.draining_server import WebConfig
from trt_lora.runtime.server.engine_process import engine_side, wire
from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.running_server import ServerConfig
from trt_lora.runtime.server.telemetry.request_log import RequestLogConfig
from trt_lora.runtime.store.config import StoreConfig


@dataclass(frozen=True)
class Spoken:
    """The tiny engine with slots, words and a template; and adapters of it, by name."""

    engine: Path
    adapters: dict[str, Path]

    @property
    def root(self) -> Path:
        """The folder of the adapters, and of nothing else."""
        return self.engine.with_name("adapters")

    def config(self, **fields: Any) -> ServerConfig:
        """A server in this process, for the base model "base" and no adapter unless asked for."""
        fields = {"in_process": True, "names": ["base"], "lora_roots": [self.root], **fields}
        return ServerConfig(self.engine, **fields)


def write_adapter(
    directory: Path, manifest: Manifest, *, rank: int = 4, seed: int = 0, **fields: object
) -> Path:
    """Write a random adapter as PEFT does."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for site in manifest.sites:
        tensors[f"{site.path}.lora_A"] = rng.normal(0, 0.3, (rank, site.k)).astype(np.float32)
        tensors[f"{site.path}.lora_B"] = rng.normal(0, 0.3, (site.n, rank)).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    targets = sorted({site.path.rpartition(".")[2] for site in manifest.sites})
    options: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": targets}
    return write_peft(directory, tensors, **options | fields)


@dataclass(frozen=True)
class Gated:
    """A server whose engine runs when it is let."""

    web: Web
    engine: GatedEngine


@contextmanager
def waiting(gated: Gated, **body: Any) -> Iterator[None]:
    """A stream that has no token yet, its step at the gate or behind the one that is there."""
    gated.engine.shut()
    asked = {"prompt": [1, 2, 3], "stream": True, "max_tokens": 1, **body}
    with gated.web.client.stream("POST", COMPLETIONS, json=asked):
        assert eventually(lambda: gated.engine.waits)
        yield


def hold_submits(patch: pytest.MonkeyPatch) -> threading.Event:
    """Keep requests from engines until the event that is returned."""
    comes, submit = threading.Event(), engine_side.EngineSide._submit

    def late(side: engine_side.EngineSide, command: wire.Submit) -> None:
        assert comes.wait(SECONDS)
        submit(side, command)

    patch.setattr(engine_side.EngineSide, "_submit", late)
    return comes


class MakeGated:
    """Starts servers of gated engines with adapters 1, 2 and 3, and ends them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch, self.ends = folder, patch, ExitStack()

    def __call__(
        self,
        *,
        rows: int = 2,
        guard: GuardConfig | None = None,
        web: WebConfig | None = None,
        requests: RequestLogConfig | None = None,
        **fields: Any,
    ) -> Gated:
        """Return a server of an engine with two slots, free to run."""
        engine = GatedEngine(self._folder / "engine", rows=rows)

        def opened(directory: str, backend: str, *, adapters: StoreConfig) -> Engine:
            assert (directory, backend) == (str(engine.directory), "auto")
            return Engine(engine, adapters)

        self._patch.setattr(engine_side, "open_engine", opened)
        modules = [(str(n), str(number_file(self._folder, n))) for n in (1, 2, 3)]
        options: dict[str, Any] = {"lora_roots": [self._folder], "lora_modules": modules}
        fields = {"names": ["base"], **options, **fields}
        config = ServerConfig(engine.directory, in_process=True, **fields)
        running = self.ends.enter_context(web_server(config, guard, web=web, requests=requests))
        self.ends.callback(engine.let)
        return Gated(running, engine)
