"""A tiny engine on a GPU: the plugin and native products against ONNX Runtime, and switches."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.tensorrt_probe import Answer

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime import Engine, Executor, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.verification.logits import forced_logits

pytestmark = pytest.mark.gpu

# Rows of different lengths; the last tokens are decoded, all rows together.
ROWS = [[5, 17, 23, 42, 7, 11, 2, 31], [9, 40, 3, 8, 12, 6]]
DECODED = 5
ADAPTERS = {"four": 4, "eight": 8}  # by rank


def test_whether_tensorrt_runs_on_this_chip_is_answered(tensorrt_answers: list[Answer]) -> None:
    """Whichever the answer is: a refusal has a reason, a result is right."""
    for answer in tensorrt_answers:
        assert answer.reason
        assert answer.runs or answer.reached != "ran", answer


@pytest.fixture(scope="module", params=["plugin", "native"])
def engine_directory(
    flavour: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An engine of a random Llama, its LoRA nodes as our plugin or as native products."""
    pytest.importorskip("transformers")
    tiny = pytest.importorskip("support.models.tiny_models")
    builder = pytest.importorskip("trt_lora.builder")
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.save_model("Llama", folder / "model", hidden_size=64)
    for name, rank in ADAPTERS.items():
        tiny.save_adapter(model, folder / name, seed=rank, r=rank)
    options: dict[str, Any] = {"flavour": flavour, "lora_plugin": request.param}
    builder.build_engine(tiny.tiny_config(model, folder / "engine", **options))
    return folder


def answers(engine: Engine, folder: Path) -> Iterator[tuple[str, Array]]:
    """Yield the logits of base and adapters, each twice in turns."""
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for name in ADAPTERS:
        manager.load_weights(name, folder / name)
    for name in ("", *ADAPTERS, "", *ADAPTERS):
        manager.reset_weights()
        if name:
            manager.switch_weights(name)
        tensor_map = TensorMap()
        manager.refresh_tensor_map(tensor_map)
        yield name, np.concatenate(forced_logits(engine, tensor_map, ROWS, decoded=DECODED))


def test_an_engine_answers_as_onnx_runtime_does_after_every_switch(
    engine_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = engine_directory / "engine"
    with open_engine(directory, "onnxruntime") as engine:
        expected = list(answers(engine, engine_directory))
    with open_engine(directory, "tensorrt") as engine, caplog.at_level(logging.WARNING):
        actual = list(answers(engine, engine_directory))
    assert not caplog.messages  # every decode step was captured
    base = expected[0][1]
    for (name, theirs), (_, ours) in zip(expected, actual, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2, err_msg=name)
        assert not name or np.abs(theirs - base).max() > 0.1, f"{name} changes nothing"
    for (name, first), (_, again) in zip(actual[:3], actual[3:], strict=True):
        assert np.array_equal(first, again), f"{name!r} answers otherwise the second time"


def base_bindings(engine: Executor) -> TensorMap:
    """Return the LoRA bindings of the base model."""
    manager, tensor_map = LoRAManager(), TensorMap()
    manager.initialize_engine_bindings(engine)
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def test_a_row_that_has_moved_goes_on_as_before(engine_directory: Path) -> None:
    with open_engine(engine_directory / "engine", "tensorrt") as engine:
        bindings = base_bindings(engine)
        stayed, moved = (StaticDecoder(engine, bindings, 2) for _ in range(2))
        stayed.cache.admit("it")
        for owner in ("first", "it"):
            moved.cache.admit(owner)
            moved.run(np.array([ROWS[0]]), first=moved.cache.row_of(owner))
        stayed.run(np.array([ROWS[0]]))
        moved.cache.release("first", clear=True)
        for token in ROWS[1]:
            ours, theirs = (decoder.decode(np.array([token])) for decoder in (moved, stayed))
            np.testing.assert_array_equal(ours, theirs)


def test_tensorrt_refuses_a_cache_output_at_an_address_of_its_own(engine_directory: Path) -> None:
    directory = engine_directory / "engine"
    manifest = read_manifest(directory)
    apart = tuple(replace(output, in_place_of="") for output in manifest.outputs)
    with TensorRTEngine(directory, replace(manifest, outputs=apart)) as engine:
        decoder = StaticDecoder(engine, base_bindings(engine), 1)
        decoder.cache.admit("it")
        with pytest.raises((BackendError, TensorError)):
            decoder.run(np.array([ROWS[0]]))
