"""What the lowering passes ask of a graph, and what they promise: both are checked."""

from collections.abc import Callable

import onnx_ir as ir
import pytest
from support.models.static_graphs import Layer, named
from support.models.token_graphs import GATED, HEAD, graph

from trt_lora.builder.passes.lowering.disable_attention_tiling import DisableAttentionTiling
from trt_lora.builder.passes.lowering.flatten_batch import FLAT, FlattenBatch
from trt_lora.builder.passes.lowering.fuse_add_into_gemm import FuseAddIntoGemm
from trt_lora.builder.passes.lowering.gather_logit_tokens import GatherLogitTokens
from trt_lora.builder.passes.lowering.grouped_query_attention import GroupQueryAttention
from trt_lora.builder.passes.lowering.optional_lora import OptionalLoRA
from trt_lora.builder.passes.lowering.rms_norms import RMSNorms
from trt_lora.builder.passes.lowering.rotary_embeddings import RotaryEmbeddings
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention

Make = Callable[[], ir.Model]


def small(body: str, inputs: str = "float[2, 4] x", opset: int = 24) -> ir.Model:
    return ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : {opset}, "trt_lora" : 1, "com.microsoft" : 1]>
g ({inputs}) => (float[a, b] y) {{ {body} }}""")


def without_mask() -> ir.Model:
    model = Layer().model()
    node_of(model, "Attention").replace_input_with(3, None)
    return model


def without_head_sizes() -> ir.Model:
    model = Layer(softcap=2.0).model()
    named(model, "ks").shape = None
    return model


def of_any_cache_length() -> ir.Model:
    model = Layer(turns=True).model()
    for value in model.graph.inputs:
        if str(value.name).startswith("cache"):
            value.shape = ir.Shape(["batch", 2, "any", 16])
    return model


def without_input(name: str, layer: Layer) -> Make:
    def make() -> ir.Model:
        model = layer.model()
        next(value for value in model.graph.inputs if value.name == name).name = "other"
        return model

    return make


def with_computed_factor() -> ir.Model:
    return small(
        "A1 = Neg(A) y = trt_lora.LoraAdd1(x, A1, B, x)", "float[2, 4] x, float A, float B"
    )


def node_of(model: ir.Model, kind: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == kind)


OWN = "y, k1, v1 = com.microsoft.GroupQueryAttention<num_heads = 1>"
FAULTS: dict[str, tuple[ir.passes.InPlacePass, Make]] = {
    "LoRA nodes have no function body": (
        FuseAddIntoGemm(),
        lambda: small("y = trt_lora.LoraAdd1(x, x, x, x)"),
    ),
    "no input kept": (GatherLogitTokens(), lambda: graph(GATED)),
    "kept is not [kept]": (GatherLogitTokens(), lambda: small("y = Neg(x)", "int64 kept, float x")),
    "nothing reads kept": (
        GatherLogitTokens(),
        lambda: small("y = Neg(x)", "int64[kept] kept, float x"),
    ),
    "no input input_ids": (FlattenBatch(), lambda: small("y = Neg(x)")),
    "input_ids is not [batch, sequence]": (
        FlattenBatch(),
        lambda: small("y = Cast<to = 1>(input_ids)", "int64[tokens] input_ids"),
    ),
    "attention reads an unknown cache": (
        DisableAttentionTiling(),
        lambda: small(f"c = Mystery(x) {OWN}(x, x, x, c, c)"),
    ),
    "is no known input": (OptionalLoRA(), with_computed_factor),
    "attention lacks a mask": (StandardAttention(), without_mask),
    "heads or widths of attention are unknown": (StandardAttention(), without_head_sizes),
    "no input bound": (GroupQueryAttention(), without_input("bound", Layer())),
    "attention lacks a mask, ": (GroupQueryAttention(), without_mask),
    "opset 22, expected 23 or later": (RMSNorms(), lambda: small("y = Neg(x)", opset=22)),
    "opset 21, expected 23 or later": (RotaryEmbeddings(), lambda: small("y = Neg(x)", opset=21)),
    "no input lengths": (RotaryEmbeddings(), without_input("lengths", Layer(turns=True))),
    "no cache of one length": (RotaryEmbeddings(), of_any_cache_length),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_graph_that_a_pass_cannot_take_is_refused_with_its_fault(fault: str) -> None:
    lowering, make = FAULTS[fault]
    with pytest.raises(ir.passes.PreconditionError) as raised:
        lowering(make())
    assert fault.removesuffix(", ") in f"{raised.value} {raised.value.__cause__}"


def half_flat() -> ir.Model:
    model = graph(GATED)
    node_of(model, "LoraAdd1").outputs[0].shape = ir.Shape([*FLAT, 4])
    return model


BROKEN: dict[str, tuple[ir.passes.InPlacePass, Make]] = {
    "a function is not inlined": (FuseAddIntoGemm(), lambda: graph(GATED)),
    "nothing reads kept any more": (
        GatherLogitTokens(),
        lambda: small("y = Neg(x)", "int64[kept] kept, float x"),
    ),
    "is flat on one side alone": (FlattenBatch(), half_flat),
    "attention has tiles": (
        DisableAttentionTiling(),
        lambda: small(f"{OWN}(x, x, x, c, c)", "float[2, 4] x, float[1, 1, 8, 8] c"),
    ),
    "A1 has no default": (OptionalLoRA(), lambda: graph(GATED)),
    "attention has a soft cap": (StandardAttention(), lambda: Layer(softcap=2.0).model()),
    "is not returned": (
        GroupQueryAttention(),
        lambda: small(f"{OWN}(x, x, x, c, c)", "float[2, 4] x, float[1, 1, 8, 8] c"),
    ),
    "a weight of another width": (
        RMSNorms(),
        lambda: small("y = RMSNormalization(x, w)", "float[2, 4] x, float[1] w"),
    ),
    "reads no tables": (
        RotaryEmbeddings(),
        lambda: small("y = RotaryEmbedding(x, c, c)", "float[2, 4] x, float[2, 2] c"),
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_result_that_breaks_a_promise_is_named(fault: str) -> None:
    lowering, make = BROKEN[fault]
    with pytest.raises(ir.passes.PostconditionError, match=fault):
        lowering.ensures(make())


def test_a_flat_graph_with_a_head_meets_all_conditions() -> None:
    model = graph(GATED, HEAD)
    for lowering in (OptionalLoRA(), FlattenBatch(), GatherLogitTokens(), FuseAddIntoGemm()):
        assert lowering(model).modified
