"""DoRA's magnitudes and biases beside B in PEFT's files: read as they are, or refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fakes.fake_engine import make_manifest
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import match_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.memory.dtypes import Array

Q = "model.layers.0.self_attn.q_proj"
MAGNITUDE, BIAS = f"{Q}.lora_magnitude_vector", f"{Q}.lora_B.bias"
VALUES = np.arange(1, 7, dtype=np.float32)
FACTORS: dict[str, Array] = {
    f"{Q}.lora_A.weight": np.ones((2, 8), np.float32),
    f"{Q}.lora_B.weight": np.ones((6, 2), np.float32),
}


def peft(folder: Path, tensors: Mapping[str, Array], **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    full = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(full, folder / "adapter_model.safetensors")
    return folder


def dora(folder: Path) -> Adapter:
    return load_adapter(peft(folder, FACTORS | {MAGNITUDE: VALUES}, use_dora=True))


def biased(folder: Path) -> Adapter:
    return load_adapter(peft(folder, FACTORS | {BIAS: VALUES}, lora_bias=True))


def test_a_magnitude_is_read_as_it_is(tmp_path: Path) -> None:
    ((at, weight),) = dora(tmp_path).vectors.items()
    assert at == ("magnitude", Q)
    np.testing.assert_array_equal(weight.values(), VALUES)


def test_a_bias_is_scaled_as_its_b_is(tmp_path: Path) -> None:
    ((at, weight),) = biased(tmp_path).vectors.items()
    assert at == ("bias", Q)
    np.testing.assert_array_equal(weight.values(), 3 * VALUES)


@pytest.mark.parametrize("make", [dora, biased])
def test_what_came_from_peft_goes_back_bit_for_bit(
    make: Callable[[Path], Adapter], tmp_path: Path
) -> None:
    source = make(tmp_path / "in")
    save_adapter(source, tmp_path / "out", "peft")
    again = load_adapter(tmp_path / "out")
    assert again.weights.keys() == source.weights.keys()
    for name, weight in source.weights.items():
        np.testing.assert_array_equal(again.weights[name].values(), weight.values())


def test_a_bias_goes_into_a_file_of_binding_names_scaled(tmp_path: Path) -> None:
    save_adapter(biased(tmp_path / "in"), tmp_path / "out", "edgellm", dtype="float32")
    ((at, weight),) = load_adapter(tmp_path / "out").vectors.items()
    assert at == ("bias", Q)
    np.testing.assert_array_equal(weight.values(), 3 * VALUES)


@pytest.mark.parametrize("format", ["edgellm", "onnxruntime"])
def test_a_magnitude_goes_into_no_file_without_its_base(format: str, tmp_path: Path) -> None:
    with refused(AdapterError, MAGNITUDE, "--base DIR"):
        save_adapter(dora(tmp_path / "in"), tmp_path / "out", format)


@pytest.mark.parametrize("make", [dora, biased])
def test_tensorrt_llms_format_holds_no_vectors(
    make: Callable[[Path], Adapter], tmp_path: Path
) -> None:
    with refused(AdapterError, Q, "TensorRT-LLM's format"):
        save_adapter(make(tmp_path / "in"), tmp_path / "out", "trtllm")


def test_an_engine_without_vectors_says_what_else_can_be_done(tmp_path: Path) -> None:
    for source, field in (
        (dora(tmp_path / "1"), "use_dora"),
        (biased(tmp_path / "2"), "lora_bias"),
    ):
        advice = ("train the adapter without it", "trt-lora merge", "--lora-vectors")
        with refused(AdapterError, f"{field} is True", *advice):
            match_adapter(source, make_manifest(), strict=False)


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(("field", "lacks"), [("use_dora", "magnitude"), ("lora_bias", "bias")])
def test_a_module_without_the_vector_that_the_config_says_is_incomplete(
    field: str, lacks: str, tmp_path: Path
) -> None:
    with refused(AdapterError, tmp_path, Q, f"no {lacks} vector", f"{field} is True"):
        load_adapter(peft(tmp_path, FACTORS, **{field: True}))


@pytest.mark.parametrize(("field", "name"), [("use_dora", MAGNITUDE), ("lora_bias", BIAS)])
def test_a_vector_without_a_and_b_is_incomplete(field: str, name: str, tmp_path: Path) -> None:
    with refused(AdapterError, Q, "no A and B", f"{field} is True"):
        load_adapter(peft(tmp_path, {name: VALUES}, **{field: True}))


@pytest.mark.parametrize("name", [MAGNITUDE, BIAS])
def test_a_vector_that_the_config_does_not_speak_of_is_set_aside(name: str, tmp_path: Path) -> None:
    adapter = load_adapter(peft(tmp_path, FACTORS | {name: VALUES}))
    assert not adapter.vectors
    assert [*adapter.unusable_keys] == [f"base_model.model.{name}"]


def test_both_are_refused_together_as_peft_refuses_them(tmp_path: Path) -> None:
    tensors = FACTORS | {MAGNITUDE: VALUES, BIAS: VALUES}
    with refused(AdapterError, "use_dora and lora_bias are both true"):
        load_adapter(peft(tmp_path, tensors, use_dora=True, lora_bias=True))


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
def test_a_field_is_true_or_false(field: str, tmp_path: Path) -> None:
    with refused(AdapterError, f"{field} is 'yes', expected true or false"):
        load_adapter(peft(tmp_path, FACTORS, **{field: "yes"}))
