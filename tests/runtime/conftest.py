"""Fakes of a GPU, TensorRT and an engine that notice what is left behind; an engine that speaks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.served_engines import Spoken, write_adapter
from support.spoken_engine import spoken_engine

from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.tensorrt.graphs import MAX_GRAPHS
from trt_lora.runtime.manifest import read_manifest


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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU on which every test must leave nothing behind."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    yield fake
    fake.check()


@pytest.fixture(params=[False, True], ids=["late", "hurries"])
def hurrying(request: pytest.FixtureRequest, cuda: FakeCuda) -> None:
    """Let the GPU be as late as may be, or as early."""
    cuda.hurries = request.param


@pytest.fixture
def trt(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorRT]:
    """A TensorRT in which every test must leave no context behind."""
    fake = FakeTensorRT(cuda)
    fake.install(monkeypatch)
    yield fake
    assert not list(fake.contexts)


@pytest.fixture
def engine(trt: FakeTensorRT, tmp_path: Path) -> TensorRTEngine:
    """The tiny model's engine, not entered."""
    return TensorRTEngine(engine_directory(tmp_path / "engine"), small_manifest())


@pytest.fixture
def plain(trt: FakeTensorRT, tmp_path: Path) -> TensorRTEngine:
    """As `engine`, without CUDA graphs: every run is enqueued."""
    directory = engine_directory(tmp_path / "engine")
    return TensorRTEngine(directory, small_manifest(), max_graphs=0)


@pytest.fixture
def static_engine(trt: FakeTensorRT, tmp_path: Path) -> Callable[..., TensorRTEngine]:
    """Make an engine of the tiny model with a static cache, not entered."""

    def make(max_len: int = 16, max_graphs: int = MAX_GRAPHS) -> TensorRTEngine:
        trt.manifest = small_manifest(max_len=max_len)
        directory = engine_directory(tmp_path / "static", trt.manifest)
        return TensorRTEngine(directory, trt.manifest, max_graphs=max_graphs)

    return make
