"""Rotary embeddings: one node and tables, where these are what the graph computes."""

import numpy as np
import onnx_ir as ir
import pytest
from support.models.static_graphs import MAX_LEN, SIZE, Layer, run, step

from trt_lora.builder.passes.lowering.rotary_embeddings import ROTARY_EMBEDDING, RotaryEmbeddings

LAYER = Layer(turns=True, softcap=1.0)  # with its attribute, attention stays as it is traced


def rotary(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == ROTARY_EMBEDDING]


@pytest.mark.parametrize(("lengths", "new"), [([3, 9, 0, 14], 1), ([6], 5), ([0, 0], 7)])
def test_queries_and_keys_are_turned_by_one_node_each(lengths: list[int], new: int) -> None:
    model, feeds = LAYER.model(), step(LAYER, lengths, new)
    expected = run(model, feeds)
    assert RotaryEmbeddings()(model).modified
    assert len(rotary(model)) == 2
    assert "Cos" not in [node.op_type for node in model.graph]
    for ours, theirs in zip(run(model, feeds), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_layers_share_tables_of_every_place_in_the_cache() -> None:
    model = LAYER.model()
    RotaryEmbeddings()(model)
    one, other = rotary(model)
    assert one.inputs[1:] == other.inputs[1:]
    cos, sin = (ir.convenience.get_const_tensor(value) for value in one.inputs[1:3] if value)
    assert cos is not None
    assert sin is not None
    inverse = 10000.0 ** (-np.arange(SIZE // 2) * 2 / SIZE)
    angles = np.outer(np.arange(MAX_LEN), inverse)
    np.testing.assert_allclose(cos.numpy(), np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles), atol=1e-5)


HALVES_DIFFER = """
  double = Add(angle, angle)
  angles = Concat<axis = -1>(angle, double)
"""
INTERLEAVED = """
  pair = Unsqueeze(angle, axis_3)
  twice = Concat<axis = -1>(pair, pair)
  angles = Reshape(twice, flat)
"""
BY_NUMBER_OF_TOKENS = """
  tokens = Cast<to = 1>(new)
  scaled = Mul(angle, tokens)
  angles = Concat<axis = -1>(scaled, scaled)
"""
BY_BOUND = """
  wide = Cast<to = 1>(last)
  scaled = Div(angle, wide)
  angles = Concat<axis = -1>(scaled, scaled)
"""


@pytest.mark.parametrize("angles", [HALVES_DIFFER, INTERLEAVED, BY_NUMBER_OF_TOKENS, BY_BOUND])
def test_what_no_table_can_hold_stays_as_it_is(angles: str) -> None:
    model = Layer(turns=True, angles=angles).model()
    assert not RotaryEmbeddings()(model).modified
    assert not rotary(model)
    assert "Neg" in [node.op_type for node in model.graph]
