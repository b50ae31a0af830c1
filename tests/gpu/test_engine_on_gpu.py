"""A tiny engine on a GPU: the plugin and native products against ONNX Runtime, and switches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.bench.gpu.workloads.tensorrt_probe import Answer
from trt_lora.scripts.verification.teacher_forcing import forced_logits

pytestmark = pytest.mark.gpu

IDS = np.array([[5, 17, 23, 42]])
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
    tiny = pytest.importorskip("tiny")
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
        (logits,) = forced_logits(engine, tensor_map, [[*IDS[0].tolist(), 7]], decoded=1)
        yield name, logits


def test_an_engine_answers_as_onnx_runtime_does_after_every_switch(engine_directory: Path) -> None:
    directory = engine_directory / "engine"
    with open_engine(directory, "onnxruntime") as engine:
        expected = list(answers(engine, engine_directory))
    with open_engine(directory, "tensorrt") as engine:
        actual = list(answers(engine, engine_directory))
    base = expected[0][1]
    for (name, theirs), (_, ours) in zip(expected, actual, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2, err_msg=name)
        assert not name or np.abs(theirs - base).max() > 0.1, f"{name} changes nothing"
    for (name, first), (_, again) in zip(actual[:3], actual[3:], strict=True):
        assert np.array_equal(first, again), f"{name!r} answers otherwise the second time"
