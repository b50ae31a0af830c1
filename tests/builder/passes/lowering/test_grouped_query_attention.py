"""ONNX Runtime's own attention: it answers as the standard graph, or leaves that as it is."""

import numpy as np
import onnx_ir as ir
import pytest
from support.models.static_graphs import BOTH_WAYS, HEADS, LAYERS, STEPS, Array, Layer, run, step

from trt_lora.builder.passes.lowering.disable_attention_tiling import DisableAttentionTiling
from trt_lora.builder.passes.lowering.grouped_query_attention import GroupQueryAttention
from trt_lora.builder.passes.lowering.rotary_embeddings import RotaryEmbeddings
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention


def own_and_standard(layer: Layer) -> tuple[ir.Model, ir.Model]:
    model = layer.model()
    if layer.turns:
        assert RotaryEmbeddings()(model).modified
    standard = model.clone()
    StandardAttention()(standard)
    assert GroupQueryAttention()(model).modified
    return model, standard


def written(outputs: list[Array], lengths: list[int], new: int) -> list[Array]:
    """What is in the cache up to the lengths after the step: the rest is never looked at."""
    rows = zip(*outputs[1:], lengths, strict=True)
    return [cache[:, length : length + new] for *pair, length in rows for cache in pair]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", STEPS)
def test_it_answers_as_the_standard_graph(name: str, kind: str) -> None:
    lengths, new = STEPS[kind]
    layer = LAYERS[name]
    own, standard = own_and_standard(layer)
    feeds = step(layer, lengths, new)
    found, expected = run(own, feeds), run(standard, feeds)
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6)
    for ours, theirs in zip(
        written(found, lengths, new), written(expected, lengths, new), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def attention(model: ir.Model) -> ir.Node:
    (node,) = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    return node


def test_queries_and_keys_are_turned_inside() -> None:
    own, standard = own_and_standard(Layer(turns=True))
    assert attention(own).attributes.get_int("do_rotary") == 1
    turned = [
        [n.op_type for n in model.graph].count("RotaryEmbedding") for model in (own, standard)
    ]
    assert turned == [0, 2]
    assert attention(own_and_standard(Layer())[0]).attributes.get_int("do_rotary") == 0


def test_a_wrong_window_is_seen() -> None:
    layer = Layer(window=3)
    own, standard = own_and_standard(layer)
    node = attention(own)
    assert node.attributes.get_int("local_window_size") == 3
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 4)
    feeds = step(layer, [3, 9, 0, 14], 1)
    assert np.abs(run(own, feeds)[0] - run(standard, feeds)[0]).max() > 1e-2


def test_attention_that_it_cannot_express_stays_as_it_is() -> None:
    wide_keys, both_ways, shared = Layer(value_size=8), Layer(mask=BOTH_WAYS), Layer().model()
    added = ir.node("Identity", [shared.graph.outputs[1]], name="read_by_another_layer")
    shared.graph.append(added)
    added.outputs[0].name, added.outputs[0].type = "again", shared.graph.outputs[1].type
    shared.graph.outputs.append(added.outputs[0])
    for model in (wide_keys.model(), both_ways.model(), shared):
        before = [node.op_type for node in model.graph]
        assert not GroupQueryAttention()(model).modified
        assert [node.op_type for node in model.graph] == before


def test_heads_of_a_width_that_it_does_not_turn_are_turned_outside() -> None:
    layer = Layer(size=8, value_size=8, turns=True)
    own, standard = own_and_standard(layer)
    assert attention(own).attributes.get_int("do_rotary") == 0
    feeds = step(layer, [3, 9, 0, 14], 1)
    np.testing.assert_allclose(run(own, feeds)[0], run(standard, feeds)[0], atol=2e-6)


@pytest.mark.parametrize("turns", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("size", [4, 12, 20, 100])
def test_heads_of_a_width_that_onnx_runtime_refuses_stay_as_they_are(
    size: int, turns: bool
) -> None:
    layer = Layer(size=size, value_size=size, turns=turns)
    model = layer.model()
    before = [node.op_type for node in model.graph]
    assert not GroupQueryAttention()(model).modified
    assert [node.op_type for node in model.graph] == before
    StandardAttention()(model)
    assert run(model, step(layer, [3, 9, 0, 14], 1))[0].shape == (4, 1, HEADS * size)


@pytest.mark.parametrize("size", [8, 24, 40, 80, 104, 120])
def test_heads_of_every_multiple_of_8_are_taken_without_tiles_too(size: int) -> None:
    layer = Layer(size=size, value_size=size, turns=True)
    own, standard = own_and_standard(layer)
    assert DisableAttentionTiling()(own).modified
    feeds = step(layer, [3, 9, 0, 14], 1)
    np.testing.assert_allclose(run(own, feeds)[0], run(standard, feeds)[0], atol=1e-5)
