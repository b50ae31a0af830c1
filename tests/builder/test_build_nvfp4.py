"""Engines whose plan multiplies x and weights as NVFP4, against PEFT with x rounded alike."""

from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from support.models.checkpoints import Weights, with_weights
from support.models.coded_graphs import run
from support.models.loaded_base import loaded
from support.models.quantised import ADAPTER, FOLDER
from support.models.quick_build import quick_build
from support.models.rounded_x import answers, error, nvfp4, nvfp4_array, with_rounded_x, x_scales
from support.models.tiny_models import tiny_config

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import coded_weights
from trt_lora.builder.passes.codes.nvfp4 import rounding, rounds
from trt_lora.builder.passes.site_calls import site_calls
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.kernel_counts import kernel_layouts
from trt_lora.builder.tensorrt.onnx_bytes import parsed_form
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import ONNX_FILE, Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.terminal.engine_facts import engine_facts
from trt_lora.scripts.verification.peft_reference import PeftReference

MODEL = FOLDER / "modelopt_nvfp4"
PLAN: dict[str, Any] = {"flavour": "tensorrt-rtx"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """An engine with a plan, for tests that only read it."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    path = tmp_path_factory.mktemp("nvfp4") / "engine"
    return path, quick_build(tiny_config(MODEL, path, **PLAN, lora_plugin="plugin"))


@pytest.mark.slow
def test_linears_read_x_rounded_in_blocks_and_adapters_as_it_is(
    engine: tuple[Path, Manifest],
) -> None:
    plain = PeftReference(MODEL, {"adapter": ADAPTER})
    own = PeftReference(MODEL, {"adapter": ADAPTER})
    reference = with_rounded_x(own, x_scales(MODEL), nvfp4)
    found = answers(engine[0])
    # A rounding that falls to the other side, because of a last bit before it, is a step of E2M1.
    assert error(found, reference) < 0.2 * error(found, plain)
    graph = ir.load(engine[0] / ONNX_FILE)
    rounded = {node.outputs[0] for node in graph.graph if rounds(node)}
    assert len(rounded) == 4  # q, k, v share one
    calls = list(site_calls(graph))
    assert len(calls) == 7
    assert not any(call.x in rounded for call in calls)


@pytest.mark.slow
def test_the_manifest_says_what_codes_and_x_are(engine: tuple[Path, Manifest]) -> None:
    manifest = engine[1]
    kinds = {(k.format, k.bits, k.block, k.level) for k in manifest.weights.values()}
    assert kinds == {("nvfp4", 4, 16, "fast")}
    assert engine_facts(*engine)["weights"].startswith("linears nvfp4, x too, block 16: ")


@pytest.mark.slow
def test_lora_adds_four_kernels_a_layer(engine: tuple[Path, Manifest]) -> None:
    """Of which two round x for the four products of a layer: a product alone makes no floats."""
    layouts = islice(kernel_layouts(*engine, NoProgress(), "decode"), 2)
    plain, plugin = (len(layout.kernels) for layout in layouts)
    assert (plain, plugin) == (21, 25)  # of one layer; float16 has 13 and 17


@pytest.mark.slow
def test_tensorrt_gets_the_same_weights_in_half_the_bytes(
    engine: tuple[Path, Manifest], tmp_path: Path
) -> None:
    """Those of q, k and v, and of gate and up, lie side by side."""
    onnx = engine[0] / ONNX_FILE
    expected = {path: weight.dequantised() for path, weight in coded_weights(ir.load(onnx))}
    _, lowered = parsed_form(ir.load(onnx), onnx, tmp_path)
    made = sorted(values(ir.load(lowered)), key=lambda each: each.tobytes())
    layer = "model.layers.0."
    together = [
        np.concatenate([expected[f"{layer}{name}_proj"] for name in names])
        for names in (
            ("self_attn.q", "self_attn.k", "self_attn.v"),
            ("self_attn.o",),
            ("mlp.gate", "mlp.up"),
            ("mlp.down",),
        )
    ]
    for own, theirs in zip(made, sorted(together, key=lambda each: each.tobytes()), strict=True):
        np.testing.assert_array_equal(own, theirs)


def values(model: ir.Model) -> list[Array]:
    """What the graph's weights in E2M1 are, by ONNX's own evaluator."""
    found, model = [], ir.external_data.load_to_model(model)
    for node in list(model.graph):
        codes = node.inputs[0].const_value if node.inputs and node.inputs[0] else None
        if codes is not None and codes.dtype == ir.DataType.FLOAT4E2M1:
            part = ir.convenience.extract(model.graph, [], [node.outputs[0]])
            part.opset_imports[""] = 23  # the evaluator's newest for blocks
            evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(part, ir_version=11)))
            (value,) = evaluator.run(None, {})
            found.append(np.asarray(value))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_function_rounds_as_ml_dtypes_does(dtype: str, tmp_path: Path) -> None:
    random, unit = np.random.default_rng(0), np.array(2.0**-9, dtype)
    x = random.normal(size=(60, 48)) * 10.0 ** random.integers(-6, 2, (60, 1))
    x[0] = 0
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -2.5, -3.5, -5, 0, 1, 7, 9])
    x[1, :16] = ties.clip(max=6) * unit  # the largest is 6, and the scale the unit
    x[2] = 1e4  # more than 448 units
    x[3, 1:] = 0
    x = x.astype(dtype)
    kind = {"float32": "float", "float16": "float16"}[dtype]
    model = ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["" : 23]> g ({kind}[t, 48] x) => ({kind}[t, 48] y) '
        "{ y = Identity(x) }"
    )
    (identity,) = model.graph
    scale = ir.val("unit", const_value=ir.tensor(unit, name="unit"))
    model.graph.register_initializer(scale)
    node = rounding(model, model.graph.inputs[0], scale)
    model.graph.insert_before(identity, node)
    identity.replace_input_with(0, node.outputs[0])
    expected = nvfp4_array(x.astype(np.float32), float(unit)).astype(dtype)
    np.testing.assert_array_equal(run(model, x, tmp_path), expected)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "the plan reads weights and x as NVFP4: it runs on GPUs of 10.0 and later"),
        ({"compute_capability": ("8.9",)}, "NVFP4 is read by GPUs of 10.0 and later, not 8.9"),
        ({"quantize_level": "exact"}, "a plan that leaves x as it is would make floats of NVFP4 "),
    ],
)
def test_a_build_says_what_a_plan_of_nvfp4_needs(
    options: dict[str, Any], note: str, tmp_path: Path
) -> None:
    base = loaded(tiny_config(MODEL, tmp_path / "e", **PLAN | options), TENSORRT_RTX)
    assert len(base.codes) == (0 if options else 7)
    assert any(each.startswith(note) for each in base.notes)


def test_scales_of_parts_are_those_of_the_library_in_half_precision(tmp_path: Path) -> None:
    """Their E4M3 is kept: products that float16 has only below its normal numbers are rounded."""
    base = loaded(tiny_config(MODEL, tmp_path / "e", **PLAN, dtype="float16"), TENSORRT_RTX)
    for linear in base.codes.values():
        fine, unit = gv.present(linear.weight.parts)
        assert fine.dtype == ml_dtypes.float8_e4m3fn
        expected = (fine.astype(np.float32) * unit).astype(np.float16)
        np.testing.assert_array_equal(linear.weight.scales, expected)
        assert linear.weight.scales.dtype == np.float16


@pytest.mark.parametrize(("factor", "is_taken"), [(1e4, True), (1e7, False)])
def test_weights_that_are_infinite_in_the_engine_s_dtype_are_refused(
    factor: float, is_taken: bool, tmp_path: Path
) -> None:
    """The largest code is 6, whatever E4M3 has besides."""

    def larger(weights: Weights) -> Weights:
        units = {name: w * factor for name, w in weights.items() if name.endswith("scale_2")}
        return weights | units

    model = with_weights(MODEL, tmp_path / "m", larger)
    config = tiny_config(model, tmp_path / "e", **PLAN, dtype="float16")
    if is_taken:
        assert len(loaded(config, TENSORRT_RTX).codes) == 7
        return
    with pytest.raises(ModelError, match=r"has scales up to .* infinite in float16"):
        loaded(config, TENSORRT_RTX)
