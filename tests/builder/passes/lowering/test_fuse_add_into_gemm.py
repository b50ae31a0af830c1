"""Additions inside the products before them: the same answers, and the nodes that are run."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.models.token_graphs import GATED, SHAPES, WIDTH, feeds, graph, kinds, run

from trt_lora.builder.passes.lowering.flatten_batch import FlattenBatch
from trt_lora.builder.passes.lowering.fuse_add_into_gemm import FuseAddIntoGemm


def flat(body: str) -> ir.Model:
    model = graph(body)
    assert FlattenBatch()(model).modified
    return model


def in_file(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_answers_as_before(shape: tuple[int, int]) -> None:
    model = flat(GATED)
    expected = run(model, feeds(*shape))
    assert FuseAddIntoGemm()(model).modified
    np.testing.assert_allclose(run(model, feeds(*shape)), expected, rtol=1e-6, atol=1e-6)


def test_the_file_has_the_products_that_onnx_runtime_would_make(tmp_path: Path) -> None:
    model = flat(GATED)
    theirs = kinds(model, tmp_path)
    FuseAddIntoGemm()(model)
    found = in_file(model)
    assert found["Gemm"] == theirs["Gemm"] + theirs["FusedGemm"] == 4
    assert found["MatMul"] == theirs["MatMul"]
    assert found["Add"] == theirs["Add"] == 1  # the bias is behind a product that LoRA adds to
    assert not model.functions
    assert kinds(model, tmp_path) == theirs


@pytest.mark.parametrize(
    ("before", "instead", "gemms"),
    [
        ("y = Add(r, l3)", "y0 = Add(r, l3)\n  y = Add(y0, l3)", 3),
        (
            "b = Add(y2, bias)",
            "k = Constant<value_float = 2.0>()\n  b0 = MatMul(y2, w1)\n  b = Add(b0, k)",
            4,
        ),
    ],
    ids=["a product that is read twice", "one number for all"],
)
def test_other_additions_stay(before: str, instead: str, gemms: int) -> None:
    model = flat(GATED.replace(before, instead))
    expected = run(model, feeds(2, 3))
    FuseAddIntoGemm()(model)
    assert in_file(model)["Gemm"] == gemms
    np.testing.assert_allclose(run(model, feeds(2, 3)), expected, rtol=1e-6, atol=1e-6)


def test_a_bias_is_part_of_its_product() -> None:
    model = flat(GATED.replace("b = Add(y2, bias)", "b0 = MatMul(y2, w1)\n  b = Add(b0, bias)"))
    expected = run(model, feeds(2, 3))
    FuseAddIntoGemm()(model)
    gemms = [node for node in model.graph if node.op_type == "Gemm"]
    shapes = [list(node.inputs[2].shape or ()) for node in gemms if node.inputs[2]]
    assert (len(gemms), [WIDTH] in shapes) == (5, True)
    np.testing.assert_allclose(run(model, feeds(2, 3)), expected, rtol=1e-6, atol=1e-6)
