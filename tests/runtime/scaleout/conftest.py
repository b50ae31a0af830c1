"""A worker of Dynamo over an engine that runs when it is let, with adapters 1 and 2 in a folder."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.asked_worker import AskedWorker
from support.fakes.fake_dynamo import install
from support.fakes.gated_engine import GatedEngine
from support.fakes.slot_engine import number_file

from trt_lora.runtime.scaleout import worker_engine

MODULE = "trt_lora.runtime.scaleout.dynamo"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AskedWorker]:
    """One that is not started yet."""
    engine = GatedEngine(tmp_path / "engine")
    folder = tmp_path / "adapters"
    folder.mkdir()
    for number in (1, 2):
        number_file(folder, number).rename(folder / f"a{number}.safetensors")
    fake = install(monkeypatch)
    monkeypatch.setattr(worker_engine, "open_executor", lambda directory, backend: engine)
    yield AskedWorker(folder, fake, engine, importlib.import_module(MODULE))
    del sys.modules[MODULE]
