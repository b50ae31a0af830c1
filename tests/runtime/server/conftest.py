"""A server of the tiny engine, its twin without HTTP, and one whose engine waits to be let."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served_engines import MakeGated, Spoken
from support.web_server import Web, web_server

from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.manifest import Manifest, read_manifest


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
