"""The example for Triton: requests of many adapters share a batch, each with its own answer."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from support.doc_blocks import ROOT
from support.fakes import fake_triton
from support.fakes.fake_triton import FakeRequest
from support.fakes.slot_engine import POISON, SlotEngine, expected_answer, number_file

from trt_lora.runtime import Engine, SamplingParams
from trt_lora.runtime.memory.dtypes import Array

EXAMPLE = ROOT / "examples" / "triton"
SAMPLING = SamplingParams(max_tokens=5, temperature=0)


class OpenedSlotEngine(SlotEngine):
    """A context manager over a directory without a tokenizer."""

    directory = Path("engines/many")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is held."""


@pytest.fixture
def engine() -> OpenedSlotEngine:
    return OpenedSlotEngine(2)


@pytest.fixture
def model(
    engine: OpenedSlotEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The model as Triton runs it, on an engine of two slots with four adapters in a folder."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    spec = importlib.util.spec_from_file_location("triton_model", EXAMPLE / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "open_engine", lambda _: Engine(engine))
    for number in (1, 2, 3, POISON):
        number_file(tmp_path, number)
    parameters = {"engine": "engines/many", "adapters": str(tmp_path)}
    config = {"parameters": {key: {"string_value": v} for key, v in parameters.items()}}
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps(config)})
    yield model
    model.finalize()


def request(prompt: list[int], number: int = 0, **inputs: Any) -> FakeRequest:
    """A request for the adapter of a number, 0 for the base model."""
    arrays: dict[str, Array] = {
        "input_ids": np.array(prompt, np.int64),
        "max_tokens": np.array([5], np.int64),
    }
    if number:
        arrays["lora_name"] = np.array([f"{number}.safetensors".encode()], np.object_)
    return FakeRequest(arrays | inputs)


def expected(prompt: list[int], number: int = 0) -> list[int]:
    answer = expected_answer(
        prompt,
        number,
        SamplingParams(max_tokens=5, stop_token_ids=(2,), ignore_eos=True, temperature=0),
    )
    return [token for token in answer if token is not None]


def test_requests_of_more_adapters_than_slots_are_answered_as_alone(model: Any) -> None:
    asked = {number: request([5, 6, number], number) for number in (0, 1, 2, 3)}
    model.execute([asked[0], asked[1]])
    model.execute([asked[2], asked[3]])
    for number, each in asked.items():
        assert each.answer() == expected([5, 6, number], number)


def test_a_request_that_fails_ends_with_its_error_and_no_other_does(model: Any) -> None:
    unknown = request([5], lora_name=np.array([b"nobody"], np.object_))
    poisoned, fine = request([5], POISON), request([5], 1)
    empty = request([])
    model.execute([unknown, poisoned, empty, fine])
    assert "nobody" in unknown.answer()[0]
    assert f"{POISON}.safetensors" in poisoned.answer()[-1]
    assert "is empty" in empty.answer()[0]
    assert fine.answer() == expected([5], 1)


def test_a_broken_engine_ends_every_request_and_later_ones_are_served(
    model: Any, engine: SlotEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "execute", broken)
        lost = [request([5], 1), request([6])]
        model.execute(lost)
        assert [each.answer() for each in lost] == [["the device is lost"]] * 2
    again = request([5], 1)
    model.execute([again])
    assert again.answer() == expected([5], 1)


def test_the_configuration_names_what_the_model_reads() -> None:
    config, code = ((EXAMPLE / name).read_text() for name in ("config.pbtxt", "model.py"))
    assert "decoupled: true" in config
    named = set(re.findall(r'(?:name|key): "(\w+)"', config))
    assert {name for name in named if f'"{name}"' in code} == named
    assert len(named) == 6
