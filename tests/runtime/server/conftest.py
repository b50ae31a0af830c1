"""A server of the tiny engine, its twin without HTTP, and one whose engine waits to be let."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.served_engines import MakeGated, Spoken, write_adapter
from support.spoken_engine import spoken_engine
from support.web_server import Web, web_server

from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.manifest import Manifest, read_manifest


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


@pytest.fixture
def make_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGated]:
    """See `MakeGated`."""
    make = MakeGated(tmp_path, monkeypatch)
    with make.ends:
        yield make


@pytest.fixture(scope="module")
def manifest(spoken: Spoken) -> Manifest:
    return read_manifest(spoken.engine)


@pytest.fixture
def place(spoken: Spoken, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder below the root for one test."""
    folder = spoken.root / f"of_{request.node.name}"[:60]
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
