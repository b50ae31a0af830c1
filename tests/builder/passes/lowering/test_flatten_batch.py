"""Tokens computed flat: the same answers of fewer nodes, and what is not by token left alone."""

from pathlib import Path

import numpy as np
import pytest
from support.models.token_graphs import GATED, MIXED, SHAPES, feeds, graph, kinds, run

from trt_lora.builder.passes.lowering.flatten_batch import FlattenBatch
from trt_lora.plugins.contract.operators import DOMAIN

ACROSS = GATED.replace("Sigmoid(y1)", "LayerNormalization<axis = 1>(y1, plane)").replace(
    "Add(y2, bias)", "Add(y2, plane)"
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("body", [GATED, MIXED], ids=["gated", "mixed"])
def test_it_answers_as_before(body: str, shape: tuple[int, int]) -> None:
    expected, flat = run(graph(body), feeds(*shape)), graph(body)
    assert FlattenBatch()(flat).modified
    np.testing.assert_allclose(run(flat, feeds(*shape)), expected, rtol=1e-6, atol=1e-6)


def test_what_works_on_places_stays_as_it_is() -> None:
    expected, flat = run(graph(ACROSS), feeds(2, 3)), graph(ACROSS)
    FlattenBatch()(flat)
    np.testing.assert_allclose(run(flat, feeds(2, 3)), expected, rtol=1e-6, atol=1e-6)


def test_onnx_runtime_adds_inside_the_products(tmp_path: Path) -> None:
    flat = graph(GATED)
    assert kinds(flat, tmp_path)["Add"] == 5  # two linears, a bias, a delta and the residual
    assert FlattenBatch()(flat).modified
    found = kinds(flat, tmp_path)
    assert (found["Add"], found["Reshape"]) == (1, 2)  # the bias; in and out
    products = found["Gemm"] + found["FusedGemm"]  # with what is made of the sum
    assert products == 4  # of three sites and of the linear before the residual


def test_a_view_of_a_view_is_one_view(tmp_path: Path) -> None:
    views = "e = Gather(table, input_ids)\n  halves = Reshape(e, two)\n  h = Reshape(halves, one)"
    flat = graph(GATED.replace("h = Gather(table, input_ids)", views))
    expected = run(flat, feeds(2, 3))
    FlattenBatch()(flat)
    assert kinds(flat, tmp_path)["Reshape"] == 2
    np.testing.assert_allclose(run(flat, feeds(2, 3)), expected, rtol=1e-6, atol=1e-6)


def test_a_graph_that_would_have_more_nodes_stays_as_it_is() -> None:
    alone = graph("""
  h = Gather(table, input_ids)
  l3 = MatMul(h, w3)
  r = trt_lora.LoraAdd1(h, A3, B3, h)
  y = Add(r, l3)
""")
    assert not FlattenBatch()(alone).modified


def test_tokens_with_slots_stay_as_they_are() -> None:
    slots = graph(GATED)
    for node in slots.graph:
        if node.domain == DOMAIN:
            node.op_type = node.op_type.replace("Lora", "LoraSlots")
    assert not FlattenBatch()(slots).modified
