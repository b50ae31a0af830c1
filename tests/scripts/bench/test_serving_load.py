"""What requests do to each other, measured on a tiny engine: every row has numbers and ratios."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyEngine
from support.served_engines import write_adapter
from support.spoken_engine import spoken_engine

from trt_lora.runtime.manifest import read_manifest
from trt_lora.scripts.bench import serving_load
from trt_lora.scripts.bench.http_serving import web
from trt_lora.scripts.bench.serving_load import LOADS, QUIET, RESIDENT, SPREAD
from trt_lora.scripts.measuring.worker import WrongResultError

SIZES = {"ROUNDS": 2, "ROWS": 2, "TOKENS": 40, "LONG": 40, "ZIPF": 8, "SHORT": 4, "FLOOD": 20}


@pytest.mark.slow
def test_each_bar_has_its_numbers(
    tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = spoken_engine(tiny_engine.slots, tmp_path / "engine")
    paths = [
        write_adapter(tmp_path / "adapters" / f"a{seed}", read_manifest(engine), seed=seed)
        for seed in range(2)
    ]
    for name, value in SIZES.items():
        monkeypatch.setattr(serving_load, name, value)
    gaps, zipf, flood, slot = serving_load.loads(engine, paths)
    assert f"{LOADS} / {QUIET}" in gaps.ratios
    assert len(gaps.ratios) == 2
    assert list(zipf.ratios) == [f"{SPREAD} / {RESIDENT}"]
    assert list(flood.ratios) == ["beside a flood / (2 alone + a turn)"]
    assert (slot.sizes["steps, most"], list(slot.ratios)) == (98, ["the latest / steps, most"])
    for row in (gaps, zipf, flood, slot):
        assert min(row.variants.values()) > 0


def test_a_refusal_is_no_result(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    engine = spoken_engine(tiny_engine.slots, tmp_path / "engine")
    words = ("trt_lora.scripts.bench.stub_server", 1, 1.0, "serve", engine)
    with web(*words) as server:
        client = serving_load.Client(server.port)
        works: tuple[Coroutine[Any, Any, Any], ...]
        works = client.times("nobody", 2), client.load("x", tmp_path)
        for asked in works:
            with pytest.raises(WrongResultError):
                asyncio.run(asked)
