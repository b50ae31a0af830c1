"""Graphs by optimum and by ONNX Runtime GenAI, as `make_files.py` made them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.builder.passes.merge_lora import MergeLoRA
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.runtime import Manifest, TensorMap, open_engine
from trt_lora.runtime.memory.tensor import tensor_from_numpy

FILES = Path(__file__).parent / "files"
LAYERS = [f"model.layers.{n}" for n in (0, 1)]
GENAI = {
    "lm_head": (32, 32),
    **{f"{layer}.attn.qkv_proj": (32, 64) for layer in LAYERS},
    **{f"{layer}.attn.o_proj": (32, 32) for layer in LAYERS},
    **{f"{layer}.mlp.{name}_proj": (32, 64) for layer in LAYERS for name in ("gate", "up")},
    **{f"{layer}.mlp.down_proj": (64, 32) for layer in LAYERS},
}
QKV = (32, 16, 16)  # 2 heads of 16, and one
Arrays = Mapping[str, npt.NDArray[Any]]


def built(name: str, output: Path, *targets: str, **options: object) -> Manifest:
    fields = {"flavour": "none", **options}
    return build_engine(GraphConfig(FILES / f"{name}.onnx", output, targets, **fields))  # type: ignore[arg-type]


def prompt() -> Arrays:
    """Inputs of a Llama of genai's: three tokens and no cache."""
    empty = np.zeros((1, 1, 0, 16), np.float32)
    past = {f"past_key_values.{n}.{kind}": empty for n in (0, 1) for kind in ("key", "value")}
    mask, ids = np.ones((1, 3), np.int64), np.array([[3, 14, 15]])
    return {"input_ids": ids, "attention_mask": mask, **past}


def of_file(path: Path, inputs: Arrays) -> npt.NDArray[np.float32]:
    session = onnxruntime.InferenceSession(path)
    named = {value.name for value in session.get_inputs()}
    return np.asarray(session.run(None, {n: a for n, a in inputs.items() if n in named})[0])


def test_codes_of_onnx_runtimes_own_are_not_merged(tmp_path: Path) -> None:
    manifest = built("genai_int4", tmp_path / "e", "o_proj")
    ones = {n: np.ones(s.shape(factor, 1)) for n, (s, factor) in manifest.lora_bindings.items()}
    merge = MergeLoRA(manifest, ones, tmp_path / "weights")
    with pytest.raises(ModelError, match=r"0\.attn\.o_proj is no constant matrix: it cannot be"):
        merge(ir.load(tmp_path / "e" / "model.onnx"))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_every_linear_of_genai_is_a_site_with_its_parts(precision: str, tmp_path: Path) -> None:
    onnx_file = FILES / f"genai_{precision}.onnx"
    listing = list_sites(GraphConfig(onnx_file, tmp_path / "e", ("all-linear",)))
    assert {site.path: (site.k, site.n) for site in listing.sites} == GENAI
    assert {s.dtype for s in listing.sites} == {"float16" if precision == "fp16" else "float32"}
    parts = {site.path: site.parts for site in listing.sites if site.parts}
    assert parts == {f"{layer}.attn.qkv_proj": QKV for layer in LAYERS}


def test_genai_with_an_adapter_is_genai_with_merged_weights(tmp_path: Path) -> None:
    site_map = tmp_path / "map.json"
    site_map.write_text('{"rename": {"[.]attn[.]": ".self_attn."}}')
    manifest = built("genai_fp32", tmp_path / "e", "all-linear", site_map=site_map)
    site = next(s for s in manifest.sites if s.path.endswith("0.self_attn.qkv_proj"))
    assert site.parts == QKV
    rng = np.random.default_rng(0)
    factors = {p: rng.standard_normal((32, 2)).astype(np.float32) / 6 for p in ("q_proj", "v_proj")}
    ups = {"q_proj": rng.standard_normal((2, 32)), "v_proj": rng.standard_normal((2, 16))}
    save_peft(tmp_path / "a", "model.layers.0.self_attn", factors, ups)
    merged = onnx.load(FILES / "genai_fp32.onnx")
    weight = next(w for w in merged.graph.initializer if "0.attn.qkv_proj" in w.name)
    values = numpy_helper.to_array(weight).copy()
    values[:, :32] += factors["q_proj"] @ ups["q_proj"].astype(np.float32)
    values[:, 48:] += factors["v_proj"] @ ups["v_proj"].astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(merged, tmp_path / "merged.onnx")
    inputs = prompt()
    with open_engine(tmp_path / "e", "onnxruntime") as engine:
        own = {n: a for n, a in inputs.items() if n in engine.input_names}
        base = engine.run(own)["logits"]
        engine.adapters.load("a", tmp_path / "a")
        adapted = engine.run(own, adapter="a")["logits"]
    np.testing.assert_array_equal(base, of_file(FILES / "genai_fp32.onnx", inputs))
    expected = of_file(tmp_path / "merged.onnx", inputs)
    np.testing.assert_allclose(adapted, expected, atol=2e-6 * np.abs(expected).max())
    assert np.abs(adapted - base).max() > 1e-3


def save_peft(folder: Path, path: str, downs: Arrays, ups: Arrays) -> None:
    """Write a PEFT directory: A and B transposed, alpha the rank."""
    import json

    from safetensors.numpy import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [*downs]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name in downs:
        key = f"base_model.model.{path}.{name}"
        tensors[f"{key}.lora_A.weight"] = np.ascontiguousarray(downs[name].T, np.float32)
        tensors[f"{key}.lora_B.weight"] = np.ascontiguousarray(ups[name].T, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_codes_of_onnxruntime_take_lora_beside_them(tmp_path: Path) -> None:
    built("genai_int4", tmp_path / "e", "lm_head")
    inputs = prompt()
    base = of_file(FILES / "genai_int4.onnx", inputs)
    with open_engine(tmp_path / "e", "onnxruntime") as engine:
        own = {n: a for n, a in inputs.items() if n in engine.input_names}
        np.testing.assert_array_equal(engine.run(own)["logits"], base)
        # Where A is the identity, a logit is moved by the sum of the states that B adds up.
        moved = []
        for column in (np.ones((32, 1)), np.zeros((32, 1))):
            up = np.hstack([column, np.zeros((32, 31))]).astype(np.float32)
            lora = {"lora_A_lm_head": np.eye(32, dtype=np.float32), "lora_B_lm_head": up}
            tensors = {n: tensor_from_numpy(a) for n, a in {**own, **lora}.items()}
            moved.append(engine.execute(TensorMap(tensors))["logits"].numpy() - base)
    assert np.array_equal(moved[1], np.zeros_like(base))
    assert not moved[0][..., 1:].any()
    assert np.abs(moved[0][..., 0]).min() > 1e-3


def test_a_plan_of_onnxruntimes_operators_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GroupQueryAttention.*pass --flavour none"):
        built("genai_int4", tmp_path / "e", "lm_head", flavour="tensorrt-rtx")


def test_optimum_names_every_linear_by_its_scope(tmp_path: Path) -> None:
    listing = list_sites(GraphConfig(FILES / "optimum_vit_model.onnx", tmp_path, ("all-linear",)))
    per_layer = {
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
    }
    per_layer |= {"attention.output.dense", "intermediate.dense", "output.dense"}
    expected = {f"vit.encoder.layer.{n}.{name}" for n in (0, 1) for name in per_layer}
    assert {site.path for site in listing.sites} == expected | {"classifier"}
    assert len(listing.sites) == 13
    reasons = {item.reason for item in listing.left_alone}
    assert any(reason.startswith("it is a convolution") for reason in reasons)


def test_tensorrt_rtx_builds_optimums_vit_and_onnxruntime_runs_it(tmp_path: Path) -> None:
    file = FILES / "optimum_vit_model.onnx"
    names = [dim.dim_param or str(dim.dim_value) for dim in
             onnx.load(file).graph.input[0].type.tensor_type.shape.dim]  # fmt: skip
    sizes = dict(zip(names, (2, 3, 16, 16), strict=True))
    shapes = tuple(f"{name}={size}" for name, size in sizes.items() if not name.isdecimal())
    built("optimum_vit_model", tmp_path / "e", "query", "classifier", shapes=shapes,
          flavour="tensorrt-rtx")  # fmt: skip
    pixels = np.random.default_rng(0).random((2, 3, 16, 16), np.float32)
    with open_engine(tmp_path / "e", "onnxruntime") as engine:
        logits = engine.run({"pixel_values": pixels})["logits"]
    np.testing.assert_allclose(logits, of_file(file, {"pixel_values": pixels}), atol=1e-6)


def test_a_prefix_goes_before_the_paths_of_an_encoder_by_itself(tmp_path: Path) -> None:
    file = FILES / "optimum_whisper_encoder_model.onnx"
    listing = list_sites(GraphConfig(file, tmp_path, ("all-linear",), path_prefix="model.encoder"))
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    expected = {f"model.encoder.layers.0.{name}" for name in (*names, "fc1", "fc2")}
    assert {site.path for site in listing.sites} == expected


def test_a_decoder_that_is_one_if_is_refused_with_that_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is inside another node's subgraph"):
        built("optimum_whisper_decoder_model_merged", tmp_path / "e", "all-linear")
