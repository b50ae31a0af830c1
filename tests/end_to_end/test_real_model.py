"""The main job on SmolLM2-135M-Instruct, with the engine that the README's command builds.

PEFT computes the reference in float64: at logits of 39 the rounding of float32, ours or PEFT's own,
is close to the tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trt_lora.builder import BuildConfig
from trt_lora.builder.build import list_sites
from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine, read_manifest
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.scripts.terminal.adapters import timed_switch
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

TOLERANCE = 1.5e-4  # PEFT in float32 is off by up to 1.1e-4, and so is the engine
STEPS = 8

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Running:
    """The engine, running, with the three adapters loaded."""

    engine: Engine
    manager: LoRAManager
    adapters: dict[str, Path]

    def answer(self, adapter: str, prompt: str) -> str:
        return self.engine.generate(prompt, adapter=adapter or None).text.strip()


@pytest.fixture(scope="module")
def running(real_engine: Path, demo_adapters: dict[str, Path]) -> Iterator[Running]:
    with open_engine(real_engine) as engine:
        for name, path in demo_adapters.items():
            engine.adapters.load(name, path)
        yield Running(engine, LoRAManager(engine.adapters), demo_adapters)


@pytest.fixture(scope="module")
def ids(running: Running) -> npt.NDArray[np.int64]:
    """A prompt and the eight tokens that follow it, [1, s]."""
    prompt = TextTokenizer(running.engine.directory).encode("What is the capital of Portugal?")
    follow = TextTokenizer(running.engine.directory)
    answer = follow.encode("Name the capital of Portugal, please.")[-STEPS:]
    return np.array([prompt + answer], np.int64)


@pytest.fixture(scope="module")
def reference(
    demo_model: Path, demo_adapters: dict[str, Path], ids: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[np.float32]]:
    """PEFT's logits [1, s, vocab] of the base model ("") and each adapter."""
    peft = PeftReference(demo_model, demo_adapters, "float64")
    return {name: peft.logits(name, ids, np.ones_like(ids)) for name in ["", *demo_adapters]}


def test_the_dry_run_lists_the_sites_that_the_build_made(
    running: Running, demo_model: Path, tmp_path: Path
) -> None:
    manifest = running.engine.manifest
    config = BuildConfig(demo_model, tmp_path, ("all-linear",), dtype=manifest.dtype)
    built = {replace(site, parts=()) for site in manifest.sites}
    assert set(list_sites(config).sites) == built


def test_logits_are_those_of_peft_and_a_second_visit_is_bit_identical(
    running: Running,
    ids: npt.NDArray[np.int64],
    reference: dict[str, npt.NDArray[np.float32]],
) -> None:
    seen: dict[str, npt.NDArray[np.float32]] = {}
    for name in ["", "json", "letter", "", "json", "pirate"]:
        ours = engine_logits(running.engine, name, ids, prompt=ids.shape[1] - STEPS)
        assert np.abs(ours - reference[name]).max() < TOLERANCE
        assert np.array_equal(ours, seen.setdefault(name, ours))
    assert np.abs(seen["json"] - seen[""]).max() > 1
    assert np.abs(seen["json"] - seen["letter"]).max() > 1


def test_dummies_give_exactly_the_logits_of_the_same_export_without_lora(
    running: Running, ids: npt.NDArray[np.int64], tmp_path: Path
) -> None:
    prompt = ids.shape[1] - STEPS
    with_dummies = engine_logits(running.engine, "", ids, prompt=prompt)
    plain = engine_without_lora(running.engine.directory, tmp_path)
    with open_engine(plain, "onnxruntime") as engine:
        assert not [name for name in engine.input_names if "lora" in name]
        without = engine_logits(engine, "", ids, prompt=prompt)
    assert np.array_equal(with_dummies, without)


def test_each_adapter_answers_the_way_it_was_trained(running: Running) -> None:
    prompt = "What is the capital of Portugal?"
    assert running.answer("json", prompt).startswith('{"answer": "')
    assert running.answer("pirate", prompt).startswith("Arr, matey!")
    assert running.answer("letter", prompt).startswith("Dear friend,")
    base = running.answer("", prompt)
    assert not base.startswith(("{", "Arr", "Dear"))
    assert "Portugal" in base


def test_switching_420_bindings_moves_pointers_and_copies_nothing(running: Running) -> None:
    def pointers(name: str) -> dict[str, int]:
        tensor_map = TensorMap()
        timed_switch(running.manager, name or None)
        running.manager.refresh_tensor_map(tensor_map)
        assert len(tensor_map) == 420
        return {binding: tensor.pointer for binding, tensor in tensor_map.items()}

    names = ["", *running.adapters]
    before = {name: pointers(name) for name in names}
    for _ in range(50):
        for name in names:
            assert timed_switch(running.manager, name or None) > 0
    assert {name: pointers(name) for name in names} == before
    assert len(set(before[""].values())) == 1  # all dummies alias one zero buffer
    assert len(set(before["json"].values())) == 420


def test_an_adapter_of_two_linears_leaves_dummies_elsewhere(running: Running) -> None:
    running.manager.switch_weights("letter")
    tensor_map = TensorMap()
    running.manager.refresh_tensor_map(tensor_map)
    for name, tensor in tensor_map.items():
        rank = tensor.shape[1 if name.startswith("lora_A") else 0]
        assert rank == (8 if name.endswith(("q_proj", "v_proj")) else 1)


def test_every_lora_binding_is_an_input_that_tensorrt_parses_with_the_right_profile(
    real_engine: Path,
) -> None:
    if not TENSORRT_RTX.installed:
        pytest.skip("TensorRT-RTX has wheels for few platforms")
    trt: Any = TENSORRT_RTX.load()
    manifest = read_manifest(real_engine)
    assert manifest.flavour == "tensorrt-rtx"
    assert len(manifest.lora_bindings) == 420
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(real_engine / "model.onnx"))
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    parsed = {value.name: tuple(value.shape) for value in inputs}
    for name, (site, factor) in manifest.lora_bindings.items():
        assert parsed[name] == site.shape(factor, -1)
        for ranges in manifest.profiles.values():
            assert ranges[name].min == site.shape(factor, 1)
            assert ranges[name].opt == site.shape(factor, 16)
            assert ranges[name].max == site.shape(factor, 64)
    assert set(parsed) == set(manifest.profiles["decode"]) == set(manifest.profiles["prefill"])
