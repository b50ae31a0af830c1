"""Stand-ins: one memory, no two equal, and only for what one linear alone has as its weight."""

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from trt_lora.builder.checkpoint.stand_ins import StandIns

SHAPES = {"h.q": (6, 4), "h.k": (6, 4), "h.down": (3, 8)}


class Model(torch.nn.Module):
    """Its linears are one level below the names that a checkpoint has."""

    base_model_prefix = "model"

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self.model, h = torch.nn.Module(), torch.nn.Module()
        self.model.h = h
        for name, weight in stand_ins.weights.items():
            h.add_module(name.removeprefix("h."), linear(weight))


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    n, k = weight.shape
    made = torch.nn.Linear(k, n, bias=False)
    made.weight = torch.nn.Parameter(weight)
    return made


def made() -> tuple[StandIns, Any]:
    stand_ins = StandIns(SHAPES, torch.float16)
    return stand_ins, Model(stand_ins)


def test_weights_are_views_of_one_small_memory_and_no_two_are_equal() -> None:
    weights = StandIns({f"{i}": (40, 30) for i in range(50)}, torch.float16).weights
    (size,) = {weight.untyped_storage().nbytes() for weight in weights.values()}
    assert size <= 2 * (40 * 30 + 50 * 64)
    assert len({weight.numpy().tobytes() for weight in weights.values()}) == 50
    assert {(weight.dtype, weight.shape) for weight in weights.values()} == {
        (torch.float16, (40, 30))
    }
    assert all(0.01 < weight.float().std() < 0.03 for weight in weights.values())
    assert StandIns({}, torch.float32).weights == {}


def test_linears_are_found_by_the_memory_of_their_weights() -> None:
    stand_ins, model = made()
    assert stand_ins.paths(model) == {name: f"model.{name}" for name in SHAPES}


def test_a_weight_that_was_copied_or_that_two_modules_share_is_none_of_theirs() -> None:
    stand_ins, model = made()
    model.model.h.q.weight = torch.nn.Parameter(model.model.h.q.weight.clone())
    model.model.table = torch.nn.Embedding(3, 8)
    model.model.table.weight = model.model.h.down.weight
    assert stand_ins.paths(model) == {"h.k": "model.h.k"}


def test_an_embedding_that_is_named_may_share_a_weight() -> None:
    stand_ins, model = made()
    model.model.table = torch.nn.Embedding(3, 8)
    model.model.table.weight = model.model.h.down.weight
    assert stand_ins.paths(model, "model.table") == {name: f"model.{name}" for name in SHAPES}


def test_a_weight_under_another_name_or_of_another_module_is_none_of_theirs() -> None:
    stand_ins, model = made()
    model.model.h.other = model.model.h._modules.pop("q")
    model.model.h.k = torch.nn.Embedding(6, 4, _weight=model.model.h.k.weight.detach())
    assert stand_ins.paths(model) == {"h.down": "model.h.down"}


def test_a_graph_s_weights_are_known_transposed_too() -> None:
    stand_ins, _ = made()
    graph = ir.Graph([], [], nodes=[], name="g")
    for name, tensor in (
        ("a", stand_ins.weights["h.q"]),
        ("b", stand_ins.weights["h.down"].T),
        ("c", torch.zeros(6, 4)),
    ):
        graph.register_initializer(ir.Value(name=name, const_value=TorchTensor(tensor, name)))
    assert stand_ins.read_by(graph) == {"h.q", "h.down"}
