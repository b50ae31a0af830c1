"""Adapters from any format to any other: every site keeps its delta, or nothing is written."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.numpy import load_file
from support.adapters.saved_adapters import CONFIG, MANIFEST, PATHS, RANKS, WEIGHTS, peft, place
from support.fakes.fake_engine import make_manifest, write_peft
from support.models.tiny_models import save_adapter as save_random_peft
from support.models.tiny_models import save_model
from transformers import AutoModelForCausalLM

from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import DTYPES, FORMATS, save_adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

pytestmark = pytest.mark.needs_torch

ALPHAS = dict(zip(PATHS, (4.0, 4.0, 0.5, 7.0), strict=True))
OTHER_FINGERPRINT = "f" * 64


def expected_deltas(directory: Path, *, rslora: bool = False) -> dict[str, Array]:
    """B A scale in float64, from the file and the two tables above."""
    tensors = load_file(directory / WEIGHTS)
    deltas = {}
    for path, rank in RANKS.items():
        a, b = (tensors[f"base_model.model.{path}.lora_{f}.weight"].astype(float) for f in "AB")
        deltas[path] = b @ a * ALPHAS[path] / (math.sqrt(rank) if rslora else rank)
    return deltas


def written_deltas(directory: Path) -> dict[str, Array]:
    """B A scale of a PEFT directory whose patterns, if any, are whole paths."""
    tensors = load_file(directory / WEIGHTS)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    assert not config.get("use_rslora")
    deltas = {}
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")]
        rank = value_of(config["rank_pattern"], path, config["r"])
        alpha = value_of(config["alpha_pattern"], path, config["lora_alpha"])
        assert len(a) == b.shape[1] == rank
        deltas[path] = b.astype(float) @ a.astype(float) * alpha / rank
    return deltas


def value_of(patterns: dict[str, float], path: str, default: float) -> float:
    return patterns.get(path, patterns.get(f"^{path}", default))


def assert_equal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_allclose(found[path], values, rtol=0, atol=2e-6)


@pytest.fixture(autouse=True)
def no_scratch_files(tmp_path: Path) -> Iterator[None]:
    """Whatever a test does, nothing hidden is left behind."""
    yield
    assert [path.name for path in tmp_path.rglob(".*")] == []


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_every_format_to_every_other_and_back_to_peft_keeps_the_deltas(
    tmp_path: Path, first: str, second: str, rslora: bool
) -> None:
    source = peft(tmp_path / "source", rslora=rslora)
    adapter = load_adapter(source)
    for name, format in (("first", first), ("second", second), ("back", "peft")):
        path = place(tmp_path, name, format)
        conversion = save_adapter(adapter, path, format, dtype="float32", manifest=MANIFEST)
        assert (conversion.rounding_error, conversion.flushed) == (0, 0)
        adapter = load_adapter(path, MANIFEST)
    assert_equal(written_deltas(tmp_path / "back"), expected_deltas(source, rslora=rslora))


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "trtllm"])
def test_no_engine_is_needed_where_the_format_holds_the_shapes(tmp_path: Path, format: str) -> None:
    source = peft(tmp_path / "source")
    path = place(tmp_path, "out", format)
    save_adapter(load_adapter(source), path, format, dtype="float32")
    save_adapter(load_adapter(path), tmp_path / "back", "peft")
    assert_equal(written_deltas(tmp_path / "back"), expected_deltas(source))


def test_peft_to_peft_is_the_same_tensors_bit_for_bit(tmp_path: Path) -> None:
    source = peft(tmp_path / "source", rslora=True)
    conversion = save_adapter(load_adapter(source), tmp_path / "out", "peft")
    before, after = load_file(source / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert (after[name].dtype, after[name].shape) == (array.dtype, array.shape)
        assert after[name].tobytes() == array.tobytes()
    assert conversion.rounding_error == 0


def test_every_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    mixed: dict[str, Array] = {
        f"{PATHS[0]}.lora_A": np.ones((2, 8), np.float16),
        f"{PATHS[0]}.lora_B": np.ones((6, 2), np.float32),
    }
    source = write_peft(tmp_path / "source", mixed, lora_alpha=6)
    save_adapter(load_adapter(source), tmp_path / "out", "peft")
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert {name.split(".")[-2]: array.dtype for name, array in found.items()} == {
        "lora_A": np.float16,
        "lora_B": np.float32,
    }


def test_the_name_of_the_base_model_is_kept(tmp_path: Path) -> None:
    adapter = load_adapter(peft(tmp_path / "source"))
    save_adapter(adapter, tmp_path / "out", "peft", manifest=MANIFEST)
    assert load_adapter(tmp_path / "out").base_model == "org/tiny"
    save_adapter(load_adapter(tmp_path / "out"), tmp_path / "again", "edgellm")
    config = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "org/tiny"


def test_a_manifest_names_the_result_as_its_engine_does(tmp_path: Path) -> None:
    adapter = load_adapter(peft(tmp_path / "source"))
    engine, path = make_manifest(names=BindingNames.EDGELLM), tmp_path / "a.onnx_adapter"
    save_adapter(adapter, path, "onnxruntime", manifest=engine)
    assert load_adapter(path).weights.keys() == engine.lora_bindings.keys()


def test_an_onnx_adapter_for_an_engine_has_every_lora_input(tmp_path: Path) -> None:
    source = write_peft(
        tmp_path / "source",
        {
            f"{PATHS[2]}.lora_A": np.ones((2, 8), np.float32),
            f"{PATHS[2]}.lora_B": np.ones((6, 2), np.float32),
        },
    )
    path = tmp_path / "a.onnx_adapter"
    save_adapter(load_adapter(source), path, "onnxruntime", manifest=MANIFEST)
    weights = load_adapter(path).weights
    assert weights.keys() == MANIFEST.lora_bindings.keys()
    for name, (site, factor) in MANIFEST.lora_bindings.items():
        own = site.path == PATHS[2]
        assert weights[name].shape == site.shape(factor, 2 if own else 1)
        assert weights[name].values().any() == own


@suppress_output()
def peft_deltas(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """What PEFT itself adds to every weight."""
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(adapter))
    layers: list[tuple[str, Any]] = [
        (name, layer) for name, layer in adapted.named_modules() if isinstance(layer, LoraLayer)
    ]
    return {name: layer.get_delta_weight("default").detach() for name, layer in layers}


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A linear model, and one whose linears are stored the other way round."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(name, folder / name) for name in ("Llama", "GPT2")}


@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
@pytest.mark.parametrize("through", ["peft", "edgellm"])
def test_peft_computes_the_same_deltas_from_what_is_written(
    tiny_models: dict[str, Path], tmp_path: Path, architecture: str, through: str
) -> None:
    model = tiny_models[architecture]
    names = {"Llama": ("1.self_attn.q_proj", "mlp.up_proj"), "GPT2": ("1.attn.c_attn", "mlp.c_fc")}
    first, second = names[architecture]
    source = save_random_peft(
        model,
        tmp_path / "source",
        r=4,
        lora_alpha=6,
        use_rslora=True,
        rank_pattern={first: 3, second: 7},
        alpha_pattern={second: 11},
    )
    save_adapter(load_adapter(source), tmp_path / "first", through, dtype="float32")
    save_adapter(load_adapter(tmp_path / "first"), tmp_path / "out", "peft")
    expected, found = peft_deltas(model, source), peft_deltas(model, tmp_path / "out")
    assert len(expected) == {"Llama": 14, "GPT2": 8}[architecture]
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert values.abs().max() > 0.1
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


def test_one_path_that_ends_as_another_keeps_its_own_rank_and_scale(tmp_path: Path) -> None:
    """PEFT's patterns name the end of a path, so a pattern may mean more than one module."""
    paths = ["q_proj", "draft.q_proj", "draft.v_proj"]
    tensors: dict[str, Array] = {}
    for path, rank in zip(paths, (3, 2, 2), strict=True):
        tensors[f"{path}.lora_A"] = np.ones((rank, 8), np.float32)
        tensors[f"{path}.lora_B"] = np.ones((6, rank), np.float32)
    ranks = {"draft.q_proj": 2, "q_proj": 3}
    adapter = load_adapter(write_peft(tmp_path / "source", tensors, rank_pattern=ranks))
    save_adapter(adapter, tmp_path / "out", "peft")
    back = load_adapter(tmp_path / "out")
    assert back.ranks == adapter.ranks == {"q_proj": 3, "draft.q_proj": 2, "draft.v_proj": 2}
    for name, weight in adapter.weights.items():
        np.testing.assert_array_equal(back.weights[name].values(), weight.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_in_the_dtype_that_is_asked_for(
    tmp_path: Path, format: str, dtype: str
) -> None:
    path = place(tmp_path, "out", format)
    adapter = load_adapter(peft(tmp_path / "source"))
    conversion = save_adapter(adapter, path, format, dtype=dtype)
    assert (conversion.rounding_error > 0) == (dtype != "float32")
    found = load_adapter(path, MANIFEST)
    assert {weight.dtype for weight in found.weights.values()} == {dtype}
    bits = {"float32": 20, "float16": 11, "bfloat16": 8}[dtype]
    for name, weight in adapter.weights.items():
        parsed = BindingNames.EDGELLM.binding("A" if "lora_A" in name else "B", name[7:])
        other = found.weights.get(name) or found.weights[parsed]
        np.testing.assert_allclose(other.values(), weight.values(), rtol=2.0**-bits, atol=1e-7)


def fingerprint_of(path: Path) -> str | None:
    with safe_open(path, framework="np") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata.get("trt_lora.base_fingerprint")


FILES = {"peft": WEIGHTS, "edgellm": "processed_adapter_model.safetensors"}


@pytest.mark.parametrize("format", FILES)
def test_the_fingerprint_of_the_engine_is_written_and_kept(tmp_path: Path, format: str) -> None:
    adapter = load_adapter(peft(tmp_path / "source"))
    save_adapter(adapter, tmp_path / "out", format, manifest=MANIFEST)
    assert fingerprint_of(tmp_path / "out" / FILES[format]) == "0" * 64
    save_adapter(load_adapter(tmp_path / "out"), tmp_path / "again", "peft")
    assert fingerprint_of(tmp_path / "again" / WEIGHTS) == "0" * 64


def test_without_an_engine_there_is_no_fingerprint(tmp_path: Path) -> None:
    save_adapter(load_adapter(peft(tmp_path / "source")), tmp_path / "out", "peft")
    assert fingerprint_of(tmp_path / "out" / WEIGHTS) is None


def other_engine() -> Manifest:
    return replace(MANIFEST, base_model=replace(MANIFEST.base_model, fingerprint=OTHER_FINGERPRINT))


@pytest.mark.parametrize("format", FILES)
def test_an_adapter_converted_for_another_engine_is_refused(tmp_path: Path, format: str) -> None:
    adapter = load_adapter(peft(tmp_path / "source"))
    save_adapter(adapter, tmp_path / "out", format, manifest=MANIFEST)
    converted = load_adapter(tmp_path / "out")
    assert fit_adapter(converted, MANIFEST).tensors.keys() == MANIFEST.lora_bindings.keys()
    with pytest.raises(AdapterError, match=f"{OTHER_FINGERPRINT}; convert it for this engine"):
        fit_adapter(converted, other_engine())
    with pytest.raises(AdapterError, match="converted for a base model"):
        save_adapter(converted, tmp_path / "again", "peft", manifest=other_engine())
    assert not (tmp_path / "again").exists()
