"""A server of the tiny engine, its twin without HTTP, and one whose engine waits to be let."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyEngine
from support.fakes.fake_engine import write_peft
from support.fakes.gated_engine import GatedEngine
from support.fakes.slot_engine import number_file
from support.spoken_engine import spoken_engine
from support.web_server import Web, web_server

from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.running_server import ServerConfig
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
        return ServerConfig(
            self.engine,
            **{"in_process": True, "names": ["base"], "lora_roots": [self.root]} | fields,
        )


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
    return write_peft(directory, tensors, r=rank, lora_alpha=rank, **fields)


@pytest.fixture(scope="session")
def spoken(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    """See `Spoken`."""
    folder = tmp_path_factory.mktemp("spoken")
    engine = spoken_engine(tiny_engine.slots, folder / "engine")
    manifest = read_manifest(engine)
    made = {
        name: write_adapter(folder / "adapters" / name, manifest, rank=rank, seed=rank)
        for name, rank in (("a", 4), ("b", 8))
    }
    return Spoken(engine, made)


@pytest.fixture(scope="module")
def web(spoken: Spoken) -> Iterator[Web]:
    """A server of both adapters."""
    modules = [(name, str(path)) for name, path in spoken.adapters.items()]
    with web_server(spoken.config(lora_modules=modules)) as running:
        yield running


@pytest.fixture(scope="module")
def twin(spoken: Spoken) -> Iterator[Engine]:
    """The same engine and adapters, without HTTP."""
    with open_engine(spoken.engine, "onnxruntime") as engine:
        for name, path in spoken.adapters.items():
            engine.adapters.load(name, path)
        yield engine


@dataclass(frozen=True)
class Gated:
    """A server whose engine runs when it is let."""

    web: Web
    engine: GatedEngine


class MakeGated:
    """Starts servers of gated engines with adapters 1, 2 and 3, and ends them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch, self.ends = folder, patch, ExitStack()

    def __call__(
        self, *, rows: int = 2, guard: GuardConfig | None = None, **fields: Any
    ) -> Gated:
        """Return a server of an engine with two slots, free to run."""
        engine = GatedEngine(self._folder / "engine", rows=rows)

        def opened(directory: str, backend: str, *, adapters: StoreConfig) -> Engine:
            assert (directory, backend) == (str(engine.directory), "auto")
            return Engine(engine, adapters)

        self._patch.setattr("trt_lora.runtime.server.engine_process.engine_side.open_engine", opened)
        modules = [(str(n), str(number_file(self._folder, n))) for n in (1, 2, 3)]
        options = {"names": ["base"], "lora_roots": [self._folder], "lora_modules": modules}
        config = ServerConfig(engine.directory, in_process=True, **options | fields)
        web = self.ends.enter_context(web_server(config, guard))
        self.ends.callback(engine.let)
        return Gated(web, engine)


@pytest.fixture
def make_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGated]:
    """See `MakeGated`."""
    make = MakeGated(tmp_path, monkeypatch)
    with make.ends:
        yield make
