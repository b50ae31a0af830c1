"""Engines of checkpoints in codes: the graph reads them back bit by bit, and answers as PEFT."""

import json
import math
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from safetensors.numpy import load_file
from support.build_progress import Notes
from support.models.checkpoints import Weights, with_config, with_weights
from support.models.loaded_base import loaded
from support.models.quantised import ADAPTER, FLOAT8, FOLDER, INTEGERS, expected_hashes, sha256
from support.models.quick_build import quick_build
from support.models.rounded_x import IDS, answers, error, int8, with_rounded_x, x_scales
from support.models.standard_engine import standard_engine
from support.models.tiny_models import save_model, tiny_config

from trt_lora.builder import BuildConfig
from trt_lora.builder.build import list_sites
from trt_lora.builder.passes import quantise_linears
from trt_lora.builder.passes.linears import Linear, find_linears
from trt_lora.builder.passes.site_calls import site_calls
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.kernel_counts import PLAIN, kernel_layouts
from trt_lora.plugins.errors import AdapterError, ConfigError, ModelError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime import open_engine
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, PLAN_FILE
from trt_lora.scripts.terminal.engine_facts import engine_facts
from trt_lora.scripts.verification.peft_reference import PeftReference


def config_of(name: str, output: Path, **options: Any) -> BuildConfig:
    return tiny_config(FOLDER / name, output, **{"quantize_level": "exact"} | options)


def read_back(engine: Path) -> dict[str, str]:
    """Hashes of the weights as ONNX Runtime makes them of the graph's nodes, by path."""
    model = ir.load(engine / ONNX_FILE)
    calls = list(site_calls(model))
    ends = [ir.node("Identity", [call.linear.inputs[1]], name=call.path) for call in calls]
    for end in ends:
        end.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.extend(ends)
    model.graph.outputs[:] = [end.outputs[0] for end in ends]
    RemoveUnusedNodesPass()(model)
    model.graph.inputs.clear()
    ir.save(model, engine / "weights.onnx")
    session = onnxruntime.InferenceSession(engine / "weights.onnx")
    weights = map(np.asarray, session.run(None, {}))
    (engine / "weights.onnx").unlink()
    return {
        call.path: sha256(w if call.linear.attributes.get_int("transB", 0) else w.T)
        for call, w in zip(calls, weights, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*INTEGERS, "bnb_int8", "bnb_nf4", "fp8_block", "modelopt_int4awq"]
)
def test_an_engine_reads_the_library_s_weights_and_answers_as_peft(
    name: str, tmp_path: Path
) -> None:
    engine, notes = tmp_path / "engine", Notes()
    manifest = quick_build(config_of(name, engine), notes)
    expected = expected_hashes(name)
    is_integer = name in INTEGERS or name == "bnb_int8"
    assert manifest.weights.keys() == (expected.keys() if is_integer else set())
    assert {kind.level for kind in manifest.weights.values()} <= {"exact"}
    if name != "bnb_int8":
        assert read_back(engine) == expected
    kinds = [node.op_type for node in ir.load(engine / ONNX_CPU_FILE).graph]
    assert kinds.count("MatMulNBits") == len(manifest.weights)
    reference = PeftReference(FOLDER / name, {"adapter": ADAPTER})
    found = answers(engine)
    for adapter, ours in found.items():
        theirs = reference.logits(adapter, IDS, np.ones_like(IDS))
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert np.abs(found[""] - found["adapter"]).max() > 1
    grown = [note for note in notes.notes if "become float32" in note]
    assert grown == [] if is_integer else grown[0].startswith("7 linears in codes of ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bnb_nf4", "ct_pack_sym"])
def test_an_engine_answers_as_the_library_and_peft_did(name: str, tmp_path: Path) -> None:
    """Their logits were kept: bitsandbytes' own layers for nf4, compressed-tensors'."""
    theirs = load_file(FOLDER / name / "logits.safetensors")
    assert np.array_equal(theirs["ids"], IDS)
    quick_build(config_of(name, tmp_path / "engine"))
    found = answers(tmp_path / "engine")
    for key, adapter in (("base", ""), ("adapter", "adapter")):
        error = np.abs(found[adapter] - theirs[key]).max()
        assert error < 1e-5 * np.abs(theirs[key]).max()


@pytest.mark.slow
def test_codes_in_act_order_share_one_gather_of_x(tmp_path: Path) -> None:
    quick_build(config_of("gptq_v1_act", tmp_path / "engine"))
    nodes = list(ir.load(tmp_path / "engine" / ONNX_CPU_FILE).graph)
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    gathers = {id(node.inputs[0].producer()) for node in products if node.inputs[0]}
    assert len(products) == 7
    assert len(gathers) == 4  # q, k, v; o; gate, up; down
    assert all(node.inputs[0].producer().op_type == "Gather" for node in products)  # type: ignore[union-attr]


@pytest.mark.slow
def test_half_precision_rounds_scales_alone(tmp_path: Path) -> None:
    quick_build(config_of("gptq_v2", tmp_path / "engine", dtype="float16"))
    reference = PeftReference(FOLDER / "gptq_v2", {"adapter": ADAPTER})
    for adapter, ours in answers(tmp_path / "engine").items():
        theirs = reference.logits(adapter, IDS, np.ones_like(IDS))
        assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()


def test_bfloat16_takes_floats_and_the_build_says_so(tmp_path: Path) -> None:
    base = loaded(config_of("gptq_v2", tmp_path / "e", dtype="bfloat16"), TENSORRT_RTX)
    assert base.codes == {}
    assert base.notes == ("7 linears in codes of gptq become bfloat16, 0.3 MB instead of 0.1",)


@pytest.mark.parametrize("name", [*INTEGERS, "bnb_int8"])
def test_a_plan_keeps_codes_without_zeros_and_the_build_says_what_it_does_not(
    name: str, tmp_path: Path
) -> None:
    base = loaded(config_of(name, tmp_path / "e"), TENSORRT_RTX)
    if name in ("bnb_int8", "ct_int8", "ct_pack_sym", "gptq_sym", "modelopt_int4awq"):
        assert len(base.codes) == 7
        assert base.notes == ()
        return
    assert base.codes == {}
    why, grown = base.notes
    assert why == (
        "a plan takes no zeros, no scales below 0, and of 8 bits one scale a row, which 7 "
        "linears in codes have otherwise: with --flavour none they stay codes, and --quantize int4 "
        "makes others of the float model"
    )
    assert grown.startswith("7 linears in codes of ")


@pytest.mark.parametrize("name", FLOAT8)
def test_a_plan_keeps_fp8_where_its_gpus_read_it(name: str, tmp_path: Path) -> None:
    engine = tmp_path / "e"
    base = loaded(config_of(name, engine, compute_capability=("8.9", "12.0")), TENSORRT_RTX)
    assert len(base.codes) == 7
    (note,) = base.notes
    assert note.startswith("a CPU makes floats of 7 linears in FP8 at every token, which is slow")
    base = loaded(config_of(name, engine, compute_capability=("8.6", "8.9")), TENSORRT_RTX)
    assert base.codes == {}
    why, grown = base.notes
    assert why == "FP8 is read by GPUs of 8.9 and later, not 8.6"
    assert grown.startswith("7 linears in codes of ")
    assert loaded(config_of(name, engine)).codes == {}


@pytest.mark.slow
def test_the_manifest_says_that_a_weight_is_fp8(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    config = config_of("fbgemm_fp8", tmp_path / "e", quantize_level="fast", flavour="tensorrt-rtx")
    manifest = quick_build(config)
    down = manifest.weights["model.layers.0.mlp.down_proj"]
    assert (down.format, down.bits, down.block, down.level) == ("fp8", 8, down.shape[1], "exact")
    assert down.source == "the checkpoint (fbgemm_fp8)"
    assert engine_facts(tmp_path / "e", manifest)["weights"].startswith("linears fp8, a scale a ro")


@pytest.mark.slow
def test_fp8_adds_no_kernels_to_a_plan_and_takes_half_the_bytes(tmp_path: Path) -> None:
    """TensorRT makes floats of codes inside its products."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32}
    floats = save_model("Llama", tmp_path / "floats", **sizes)
    codes = with_weights(floats, tmp_path / "weights", in_float8)
    codes = with_config(codes, tmp_path / "codes", quantization_config={"quant_method": "fp8"})
    counts, nbytes = [], []
    for model in (floats, codes):
        engine = tmp_path / f"{model.name}_engine"
        options = {"dtype": "float16", "flavour": "tensorrt-rtx"}
        manifest = quick_build(tiny_config(model, engine, **options))
        layouts = kernel_layouts(engine, manifest, NoProgress(), "decode")
        counts.append({each.name: len(each.kernels) for each in islice(layouts, 2)})
        nbytes.append((engine / PLAN_FILE).stat().st_size)
    assert all(counts[1][name] <= count for name, count in counts[0].items())
    assert counts[1]["plugin"] == counts[1][PLAIN] + 2 * 4  # of two layers
    saved = sum(math.prod(kind.shape) for kind in manifest.weights.values())  # a byte each
    assert nbytes[0] - nbytes[1] == pytest.approx(saved, rel=0.05)


def in_float8(weights: Weights) -> Weights:
    """Linears of layers in FP8, with a scale for each row."""
    linears = [name for name in weights if name.endswith("_proj.weight")]
    for name in linears:
        scales = weights[name].abs().amax(1, keepdim=True) / 448
        weights[name + "_scale"] = scales
        weights[name] = (weights[name] / scales).to(torch.float8_e4m3fn)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["awq_gemm", "ct_int8", "gptq_sym", "modelopt_fp8", "modelopt_int4awq"]
)
def test_a_plan_is_made_and_a_cpu_reads_the_library_s_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    engine = tmp_path / "engine"
    quick_build(config_of(name, engine, flavour="tensorrt-rtx"))
    assert (engine / PLAN_FILE).stat().st_size > 10_000
    assert read_back(engine) == expected_hashes(name)


@pytest.mark.slow
def test_a_plan_rounds_x_to_8_bits_by_the_checkpoint_s_scale(tmp_path: Path) -> None:
    """Where codes of x have a zero, or each token its scale, or for a CPU, x stays as it is."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    dynamic = with_weights(FOLDER / "ct_int8", tmp_path / "dynamic", with_scale_of_x)
    model, float8 = (with_codes_of_x(dynamic, tmp_path, kind) for kind in ("int", "float"))
    engine, plan = tmp_path / "engine", {"flavour": "tensorrt-rtx"}
    manifest = quick_build(tiny_config(model, engine, flavour="tensorrt-rtx"))
    plain = PeftReference(model, {"adapter": ADAPTER})
    own = PeftReference(model, {"adapter": ADAPTER})
    reference = with_rounded_x(own, x_scales(model), int8)
    # That for ONNX Runtime rounds x a second time, in blocks, as it does for all codes.
    found = answers(standard_engine(engine, tmp_path / "standard"))
    assert error(found, reference) < 0.2 * error(found, plain)
    layouts = islice(kernel_layouts(engine, manifest, NoProgress(), "decode"), 2)
    assert [len(each.kernels) for each in layouts] == [13, 17]  # as of floats
    asymmetric = with_weights(model, tmp_path / "z", with_zero_of_x)
    others = [(model, {}), (asymmetric, plan), (dynamic, plan), (float8, plan)]
    for other, options in others:
        base = loaded(tiny_config(other, engine, **options), TENSORRT_RTX if options else None)
        assert all(linear.weight.x_scale is None for linear in base.codes.values())


def with_codes_of_x(model: Path, folder: Path, kind: str) -> Path:
    """State that x has codes of 8 bits of a kind, with the scale that is stored."""
    fields = json.loads((model / "config.json").read_text())["quantization_config"]
    stated = {"num_bits": 8, "type": kind, "dynamic": False, "strategy": "tensor"}
    fields["config_groups"]["group_0"]["input_activations"] = stated
    return with_config(model, folder / kind, quantization_config=fields)


def with_scale_of_x(weights: Weights) -> Weights:
    """Coarse scales, whose rounding is seen."""
    paths = [name.removesuffix("_scale") for name in weights if name.endswith(".weight_scale")]
    ends = {path.removesuffix("weight") for path in paths}
    return weights | {f"{path}input_scale": torch.tensor([0.05]) for path in ends}


def with_zero_of_x(weights: Weights) -> Weights:
    """The same, and a zero that is not 0."""
    scales = [name for name in weights if name.endswith("input_scale")]
    ends = {name.removesuffix("scale") for name in scales}
    return weights | {f"{end}zero_point": torch.tensor([3], dtype=torch.int8) for end in ends}


@pytest.mark.slow
def test_a_weight_that_the_graph_computes_with_has_the_checkpoint_s_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is traced without them, and once more with those that are read."""
    path, notes = "model.layers.0.mlp.up_proj", Notes()

    def all_but_one(model: ir.Model) -> list[Linear]:
        return [linear for linear in find_linears(model) if linear.path != path]

    monkeypatch.setattr(quantise_linears, "find_linears", all_but_one)
    manifest = quick_build(config_of("gptq_v2", tmp_path / "engine"), notes)
    assert manifest.weights.keys() == expected_hashes("gptq_v2").keys() - {path}
    assert read_back(tmp_path / "engine") == expected_hashes("gptq_v2")
    (grown,) = (note for note in notes.notes if "become" in note)
    assert grown.startswith("1 linears in codes of gptq become float32, ")


def test_scales_that_are_infinite_in_the_engine_s_dtype_are_refused(tmp_path: Path) -> None:
    def larger(weights: Weights) -> Weights:
        scales = {name: w.float() * 1e7 for name, w in weights.items() if name.endswith(".scales")}
        return weights | scales

    model = with_weights(FOLDER / "gptq_v2", tmp_path / "m", larger)
    assert len(loaded(tiny_config(model, tmp_path / "e"), None).codes) == 7
    message = "has scales up to .* infinite in float16: .* needs --dtype float32"
    with pytest.raises(ModelError, match=message):
        loaded(tiny_config(model, tmp_path / "e", dtype="float16"), None)


def test_codes_are_not_rounded_a_second_time(tmp_path: Path) -> None:
    for name in ("gptq_v2", "bnb_nf4"):
        with pytest.raises(
            ConfigError, match=r"--quantize int8 would round twice: .* by (gptq|bits)"
        ):
            list_sites(config_of(name, tmp_path / "e", quantize="int8"))


@pytest.mark.parametrize("name", ["awq_gemm", "bnb_nf4", "ct_int8", "fp8_block", "gptq_v2"])
def test_sites_are_those_of_the_float_model(tmp_path: Path, name: str) -> None:
    sites = list_sites(config_of(name, tmp_path / "e")).sites
    assert {site.path for site in sites} == expected_hashes(name).keys()


@pytest.mark.slow
def test_an_adapter_of_the_original_is_refused_on_a_base_of_awq(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, adapter = tmp_path / "Llama-AWQ", tmp_path / "a"
    shutil.copytree(FOLDER / "awq_gemm", model)
    shutil.copytree(ADAPTER, adapter)
    quick_build(tiny_config(model, tmp_path / "engine"))
    fields = json.loads((adapter / "adapter_config.json").read_text())

    def load(base: str | None, **options: Any) -> None:
        text = json.dumps(fields | {"base_model_name_or_path": base})
        (adapter / "adapter_config.json").write_text(text)
        with open_engine(tmp_path / "engine", "onnxruntime") as running:
            running.adapters.load("a", adapter, **options)

    load("some/llama-awq")
    assert not caplog.messages
    load("some/Llama", strict=False)
    assert "an adapter of the original would be wrong" in caplog.text
    with pytest.raises(AdapterError, match="names 'some/Llama' as its base model, and the inputs"):
        load("some/Llama")
    with pytest.raises(AdapterError, match="names no base model, and the inputs of Llama-AWQ are"):
        load(None)
