"""Engines whose plan multiplies x and weights as FP8, against PEFT with x rounded by torch."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file
from support.build_progress import Notes
from support.models.checkpoints import Weights, with_weights
from support.models.loaded_base import loaded
from support.models.quantised import ADAPTER, FOLDER
from support.models.quick_build import quick_build
from support.models.rounded_x import IDS, answers, error, float8, with_rounded_x, x_scales
from support.models.tiny_models import save_model, tiny_config

from trt_lora.builder.build import build_engine
from trt_lora.builder.passes.codes.coded_weight import coded_weights
from trt_lora.builder.passes.site_calls import site_calls
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.quantising import quantise
from trt_lora.builder.tensorrt.kernel_counts import kernel_layouts
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime import open_engine
from trt_lora.runtime.manifest import ONNX_FILE
from trt_lora.scripts.bench.gpu.random_codes import with_random_codes
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

PLAN: dict[str, Any] = {"flavour": "tensorrt-rtx"}
MODEL = FOLDER / "modelopt_fp8"


@pytest.mark.slow
def test_linears_read_x_rounded_by_the_checkpoint_s_scale_and_adapters_as_it_is(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    engine = tmp_path / "engine"
    manifest = quick_build(tiny_config(MODEL, engine, **PLAN))
    assert {kind.level for kind in manifest.weights.values()} == {"fast"}
    plain = PeftReference(MODEL, {"adapter": ADAPTER})
    reference = with_rounded_x(PeftReference(MODEL, {"adapter": ADAPTER}), x_scales(MODEL), float8)
    found = answers(engine)
    # A rounding that falls to the other side, because of a last bit before it, is a step of E4M3.
    assert error(found, reference) < 0.2 * error(found, plain)
    nodes = list(ir.load(engine / ONNX_FILE).graph)
    assert sum(node.op_type == "QuantizeLinear" for node in nodes) == 4  # q, k, v share one
    rounded = {node.outputs[0] for node in nodes if node.op_type == "DequantizeLinear"}
    calls = list(site_calls(ir.load(engine / ONNX_FILE)))
    assert len(calls) == 7
    assert not any(call.x in rounded for call in calls)


@pytest.mark.slow
def test_rounding_x_costs_one_kernel_a_layer_in_decoding_and_none_in_prompts(
    tmp_path: Path,
) -> None:
    """It rides on norms and on gate times up; behind attention it is a kernel of its own."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32}
    floats = save_model("Llama", tmp_path / "floats", **sizes)
    codes = with_random_codes(floats, tmp_path / "codes", "fp8")
    counts = []
    for level in ("exact", "fast"):
        engine = tmp_path / level
        options = {"dtype": "float16", "quantize_level": level, "lora_plugin": "plugin", **PLAN}
        manifest = quick_build(tiny_config(codes, engine, **options))
        assert {kind.level for kind in manifest.weights.values()} == {level}
        for profile in ("decode", "prefill"):
            layouts = kernel_layouts(engine, manifest, NoProgress(), profile)
            counts.append([len(each.kernels) for each in islice(layouts, 2)])
    decode, prefill, rounded_decode, rounded_prefill = counts
    assert rounded_decode == [count + 2 for count in decode]  # of two layers
    assert rounded_prefill == prefill


def test_a_scale_of_x_is_that_of_products_alone_where_it_can_be(tmp_path: Path) -> None:
    def scales(model: Path, **options: Any) -> set[float | None]:
        base = loaded(tiny_config(model, tmp_path / "e", **options), TENSORRT_RTX)
        assert len(base.codes) == 7
        found = (linear.weight.x_scale for linear in base.codes.values())
        return {None if scale is None else float(scale) for scale in found}

    assert scales(MODEL) == {*x_scales(MODEL).values()}
    assert scales(MODEL, quantize_level="exact") == {None}

    def tiny(weights: Weights) -> Weights:
        small = {name: w * 1e-9 for name, w in weights.items() if name.endswith("input_scale")}
        return weights | small

    # In half precision it would be 0, and x of any size 448.
    model = with_weights(MODEL, tmp_path / "m", tiny)
    assert scales(model, dtype="float16") == {None}
    assert None not in scales(model)


class Letters:
    """A tokenizer of letters."""

    def __init__(self, model: Path) -> None:
        """Take any model."""

    def encode_text(self, text: str) -> list[int]:
        """Return a token for each letter."""
        return [ord(letter) % 64 for letter in text]


@pytest.mark.slow
def test_a_float_model_becomes_fp8_with_scales_of_x_that_a_text_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    monkeypatch.setattr(quantise, "TextTokenizer", Letters)
    monkeypatch.setattr(quantise, "TOKENIZER_FILE", "config.json")  # which is there
    text, engine, notes = tmp_path / "text.txt", tmp_path / "engine", Notes()
    text.write_text("the quick brown fox " * 2)
    model = save_model("Llama", tmp_path / "model", vocab_size=64)
    options = {"quantize": "fp8", "calibration": text, "quantize_block": 16, **PLAN}
    manifest = quick_build(tiny_config(model, engine, **options), notes)
    kinds = dict(manifest.weights)
    assert {kinds.pop("lm_head").format} == {"int8"}
    assert kinds.keys() == {site.path for site in manifest.sites}
    assert {(kind.format, kind.level) for kind in kinds.values()} == {("fp8", "fast")}
    (source,) = {kind.source for kind in kinds.values()}
    assert source.startswith("rounded to the nearest, x on ")
    assert any("14 linears in FP8 at every token" in note for note in notes.notes)
    plain = PeftReference(model, {})
    weights = {path: w.dequantised() for path, w in coded_weights(ir.load(engine / ONNX_FILE))}
    reference = PeftReference(model, {}, weights=weights)
    largest = largest_inputs(plain, Letters(model).encode_text(text.read_text()))
    with_rounded_x(reference, largest, float8)
    with open_engine(engine, "onnxruntime") as running:
        found = {"": engine_logits(running, "", IDS, prompt=8)}
    assert error(found, reference) < 0.2 * error(found, plain)
    assert error(found, plain) < 0.3


def largest_inputs(reference: PeftReference, ids: list[int]) -> dict[str, float]:
    """The scale of what each linear reads, so that the largest is the largest FP8."""
    found = dict[str, float]()

    def see(path: str, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        found[path] = float(args[0].abs().max()) / 448

    hooks = [
        module.register_forward_pre_hook(partial(see, path))
        for path, module in reference.model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    ]
    with torch.inference_mode():
        reference.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flavour": "none"}, "--quantize fp8 is for a plan, and none is made; pass --quantize i"),
        ({"compute_capability": ("8.6",)}, "8.6: FP8 is read by GPUs of 8.9 and later; pass --q"),
        ({"quantize_head": "fp8"}, "--quantize-head is 'fp8'; choose from: none, int8, int4"),
        ({"dtype": "bfloat16"}, "--quantize fp8 takes --dtype float16 or float32; it is bfloat16"),
    ],
)
def test_what_reads_no_fp8_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    with pytest.raises(ConfigError, match=message):
        build_engine(tiny_config(MODEL, tmp_path / "e", quantize="fp8", **PLAN | options))


def test_the_manifest_says_whose_x_is_scaled(tmp_path: Path) -> None:
    """AWQ's are; where the factors are stored, the graph multiplies, and LoRA reads x as it was."""

    def scaled(name: str) -> dict[str, bool]:
        codes = loaded(tiny_config(FOLDER / name, tmp_path / "e")).codes
        return {path: linear.format("fast", "").scales_x for path, linear in codes.items()}

    assert set(scaled("awq_gemm").values()) == {True}
    assert set(scaled("gptq_sym").values()) == {False}
    found = scaled("modelopt_int4awq")
    tensors = load_file(FOLDER / "modelopt_int4awq" / "model.safetensors")
    assert found == {path: f"{path}.pre_quant_scale" not in tensors for path in found}
    assert {*found.values()} == {True, False}
