"""Sinks that add nothing: ONNX Runtime's attention answers as without them, without tiles."""

import numpy as np
import onnx_ir as ir
import pytest
from support.models.static_graphs import LAYERS, STEPS, Array, Layer, run, step

from trt_lora.builder.passes.graph_values import graph_input
from trt_lora.builder.passes.lowering.disable_attention_tiling import DisableAttentionTiling
from trt_lora.builder.passes.lowering.grouped_query_attention import GroupQueryAttention
from trt_lora.builder.passes.lowering.rotary_embeddings import RotaryEmbeddings

NO_TILES = "ORT_GQA_DISABLE_FLASH_ATTENTION"  # what ONNX Runtime has for a whole process


def own(layer: Layer) -> ir.Model:
    model = layer.model()
    RotaryEmbeddings()(model)
    assert GroupQueryAttention()(model).modified
    return model


def sinks(model: ir.Model) -> Array:
    (node,) = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    sinks = node.inputs[11]
    assert sinks is not None
    constant = sinks.producer()
    assert constant is not None
    return constant.attributes["value"].as_tensor().numpy()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", STEPS)
def test_it_answers_as_the_operator_without_tiles(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS[name]
    feeds = step(layer, *STEPS[kind])
    model = own(layer)
    with monkeypatch.context() as context:
        context.setenv(NO_TILES, "1")
        expected = run(model, feeds)
    assert DisableAttentionTiling()(model).modified
    for ours, theirs in zip(run(model, feeds), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_scores_far_below_zero_keep_their_weight() -> None:
    layer = Layer()
    feeds = step(layer, [6], 1)
    feeds["q"] = np.full_like(feeds["q"], -1e6)
    feeds["cache.0.key"] = np.abs(feeds["cache.0.key"])
    feeds["k"] = np.abs(feeds["k"])
    model = own(layer)
    expected = run(model, feeds)[0]
    assert np.abs(expected).min() > 0
    DisableAttentionTiling()(model)
    np.testing.assert_allclose(run(model, feeds)[0], expected, rtol=1e-5)


def test_every_head_has_a_sink_of_the_lowest_number() -> None:
    model = own(Layer())
    DisableAttentionTiling()(model)
    np.testing.assert_array_equal(sinks(model), np.full(4, np.finfo(np.float32).min))
    assert sinks(model).dtype == np.float32


def test_a_long_cache_and_other_dtypes_stay_as_they_are() -> None:
    long, half, standard = own(Layer()), own(Layer()), Layer().model()
    graph_input(long, "cache.0.key").shape = ir.Shape(["batch", 2, 4097, 16])
    graph_input(half, "cache.0.key").dtype = ir.DataType.FLOAT16
    for model in (long, half, standard):
        before = list(model.graph)
        assert not DisableAttentionTiling()(model).modified
        assert list(model.graph) == before
