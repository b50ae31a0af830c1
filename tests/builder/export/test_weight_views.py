"""Weights of a traced graph are the model's own memory, and nothing is computed of them."""

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from support.models.tiny_models import ARCHITECTURES
from transformers import AutoModelForCausalLM, LlamaConfig

from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.export.causal_lm import export_causal_lm
from trt_lora.builder.export.weight_views import transpose_weights, weight_of


def exported_of(*, tied: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A Llama, and the weights of rows and columns that its graph has."""
    auto: Any = AutoModelForCausalLM
    sizes: dict[str, Any] = {**ARCHITECTURES["Llama"], "tie_word_embeddings": tied}
    model = auto.from_config(LlamaConfig(**sizes), attn_implementation=ATTENTION)
    values = export_causal_lm(model, 24).model.graph.initializers.values()
    found = {str(value.name): weight_of(value) for value in values}
    return model, {name: weight for name, weight in found.items() if weight is not None}


def test_every_weight_is_the_models_own_memory_and_those_of_linears_are_transposed() -> None:
    model, weights = exported_of(tied=False)
    owners = {p.data_ptr(): p for p in model.parameters() if p.dim() == 2}
    assert {weight.data_ptr() for weight in weights.values()} == owners.keys()
    assert len(weights) == len(owners)
    for name, weight in weights.items():
        own = owners[weight.data_ptr()]
        assert weight.stride() == (own if "embed" in name else own.T).stride()


def test_a_tied_weight_is_once_in_the_graph() -> None:
    model, weights = exported_of(tied=True)
    table = model.model.embed_tokens.weight
    assert [w.data_ptr() for w in weights.values()].count(table.data_ptr()) == 1


def graph_of(readers: int, weight: torch.Tensor, perm: tuple[int, int] = (1, 0)) -> ir.Graph:
    """Transposes that read one weight."""
    value = ir.Value(name="w", const_value=TorchTensor(weight, "w"))
    nodes = [ir.node("Transpose", [value], {"perm": perm}, name=f"t{i}") for i in range(readers)]
    outputs = [node.outputs[0] for node in nodes]
    return ir.Graph([], outputs, nodes=nodes, initializers=[value], name="g")


def test_transposes_become_views_where_they_alone_read_a_weight() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    single, shared = graph_of(1, weight), graph_of(2, weight)
    for graph in (single, shared):
        transpose_weights(graph)
    assert [node.op_type for node in shared] == ["Transpose", "Transpose"]
    assert len(single) == 0
    (made,) = single.outputs
    found = weight_of(made)
    assert found is not None
    assert found.data_ptr() == weight.data_ptr()
    assert torch.equal(found, weight.T)


def test_a_transpose_that_moves_nothing_is_left_out() -> None:
    """CodeGen's table of positions is behind one."""
    weight = torch.arange(6.0).reshape(2, 3)
    graph = graph_of(2, weight, perm=(0, 1))
    transpose_weights(graph)
    assert len(graph) == 0
    assert all(weight_of(made) is weight for made in graph.outputs)


def test_other_tensors_are_no_weights() -> None:
    numpy = ir.Value(name="n", const_value=ir.tensor([[1.0]]))
    bias = ir.Value(name="b", const_value=TorchTensor(torch.zeros(3), "b"))
    assert [weight_of(value) for value in (None, ir.Value(name="x"), numpy, bias)] == [None] * 4
