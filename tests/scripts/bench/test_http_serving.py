"""The server beside `Scheduler`, and its own cost over a stub, on a tiny engine."""

import asyncio
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.served_engines import write_adapter
from support.spoken_engine import spoken_engine

from trt_lora.builder import BuildConfig
from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.manifest import read_manifest
from trt_lora.scripts.bench import http_serving
from trt_lora.scripts.bench.http_serving import ALONE, SAMPLED, STREAMED, WAYS, WHOLE
from trt_lora.scripts.measuring.worker import WrongResultError

STUB = "trt_lora.scripts.bench.stub_server"


@pytest.fixture
def engine(tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny engine with slots, two adapters, and few tokens."""
    engine = spoken_engine(tiny_engine.slots, tmp_path / "engine")
    for seed in range(2):
        write_adapter(tmp_path / "adapters" / f"a{seed}", read_manifest(engine), seed=seed)
    sizes = {"STREAMS": 4, "TOKENS": 5, "ROUNDS": 2, "FIRST_TOKENS": 2}
    sizes |= {"STUB_TOKENS": 7, "STUB_ROUNDS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(http_serving, name, value)
    monkeypatch.setattr(http_serving, "ADAPTERS", tmp_path / "adapters")
    return engine


def test_server_and_scheduler_are_asked_in_turns(engine: Path) -> None:
    first, full = http_serving.beside_scheduler(engine)
    assert list(first.variants) == [
        *("Scheduler, ms", "streamed, ms", "streamed less Scheduler, ms")
    ]
    assert list(full.variants) == [f"{name}, tokens/s" for name in (ALONE, *WAYS)]
    assert min(full.variants.values()) > 0
    assert list(full.ratios) == [
        *(f"{STREAMED} / {ALONE}", f"{WHOLE} / {ALONE}", f"{SAMPLED} / {STREAMED}")
    ]
    assert full.sizes == {"streams": 4, "adapters": 2, "tokens": 5, "rounds": 2}


def test_the_webs_own_cost_is_that_of_its_process(engine: Path) -> None:
    row = http_serving.web_part(engine, 3, 1.0)
    used = [row.variants[name] for name in ("least of a round", "processor time of a token, us")]
    assert 0 < used[0] <= used[1] <= row.variants["most of a round"]


def test_every_way_has_all_its_tokens_and_a_refusal_is_no_result(engine: Path) -> None:
    with http_serving.web(STUB, 2, 1.0, "serve", engine) as server:
        for way, asked in WAYS.items():
            first, tokens = asyncio.run(server.ask(http_serving.body_of("w1", "base", 6) | asked))
            assert (first > 0) == (way != WHOLE)
            assert tokens == 6
        with pytest.raises(WrongResultError, match="404 Not Found"):
            asyncio.run(server.ask(http_serving.body_of("w1", "nobody", 6)))


def test_the_engine_is_that_of_the_page_about_many_adapters(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[BuildConfig] = []
    monkeypatch.setattr(http_serving, "ensure_demo_model", Path)
    monkeypatch.setattr(http_serving, "ensure_engine", lambda config, _: configs.append(config))
    assert http_serving.built() == Path("engines/many")
    (config,) = configs
    assert [path.name for path in config.lora_dirs] == ["a0", "a1"]
    assert (config.max_loras, config.dtype, config.flavour) == (2, "float32", "none")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(BackendError, match="none does not exist"),
        http_serving.web(STUB, 1, 1.0, "serve", tmp_path / "none"),
    ):
        raise AssertionError("there is no engine")
