"""Triton's model, as Triton runs it, on an engine that waits to be let."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fakes import fake_triton
from support.fakes.gated_engine import GatedEngine
from support.fakes.slot_engine import POISON, number_file

from trt_lora.runtime import Engine
from trt_lora.runtime.scaleout.triton.settings import Settings
from trt_lora.runtime.store.config import StoreConfig

MakeModel = Callable[..., Any]


@pytest.fixture
def gated(tmp_path: Path) -> GatedEngine:
    """Two slots and two rows."""
    (tmp_path / "engine").mkdir()
    return GatedEngine(tmp_path / "engine")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters 1, 2, 3, and one that answers with NaN."""
    home = tmp_path / "adapters"
    home.mkdir()
    for number in (1, 2, 3, POISON):
        number_file(home, number)
    return home


@pytest.fixture
def make_model(
    gated: GatedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeModel]:
    """Load a model; its configuration has some fields more, and parameters."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    module = importlib.import_module("trt_lora.runtime.scaleout.triton.model")
    made: list[Any] = []

    def make(*, host_memory: int | None = None, config: Any = None, **parameters: str) -> Any:
        store = StoreConfig(host_memory=host_memory)
        monkeypatch.setattr(Settings, "open", lambda _: Engine(gated, store))
        given = {"engine": "engines/many", "adapters": str(folder), **parameters}
        told = {key: {"string_value": value} for key, value in given.items()}
        policy = {"model_transaction_policy": {"decoupled": True}, "max_batch_size": 1}
        text = json.dumps({"parameters": told, **policy, **(config or {})})
        model = module.TritonPythonModel()
        model.initialize({"model_config": text, "model_name": "many"})
        made.append(model)
        return model

    yield make
    gated.let()
    for model in made:
        model.finalize()


@pytest.fixture
def model(make_model: MakeModel) -> Any:
    return make_model()
