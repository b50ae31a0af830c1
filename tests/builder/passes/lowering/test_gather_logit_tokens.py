"""Tokens that get no logits: what lies behind the last attention is not computed for them."""

import numpy as np
import onnx_ir as ir
import pytest
from support.models.token_graphs import GATED, HEAD, MIXED, SHAPES, WIDTH, feeds, graph, run

from trt_lora.builder.passes.lowering.flatten_batch import FlattenBatch
from trt_lora.builder.passes.lowering.fuse_add_into_gemm import FuseAddIntoGemm
from trt_lora.builder.passes.lowering.gather_logit_tokens import GatherLogitTokens

BODIES = {"gated": GATED, "mixed": MIXED}
KEPT = {"last": [-1], "none": [], "all": None, "some, again, in disorder": [-1, 0, -1]}


def flat(body: str) -> ir.Model:
    model = graph(body, HEAD)
    assert FlattenBatch()(model).modified
    return model


def places(name: str, tokens: int) -> list[int]:
    kept = KEPT[name]
    return list(range(tokens)) if kept is None else [place % tokens for place in kept]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("body", BODIES)
def test_it_answers_as_before(body: str, kept: str, shape: tuple[int, int]) -> None:
    inputs = feeds(*shape) | {"kept": np.array(places(kept, shape[0] * shape[1]), np.int64)}
    model = flat(BODIES[body])
    expected = run(model, inputs)
    assert expected.shape == (1, len(inputs["kept"]), WIDTH)
    assert GatherLogitTokens()(model).modified
    np.testing.assert_allclose(run(model, inputs), expected, rtol=1e-6, atol=1e-6)
    assert FuseAddIntoGemm()(model).modified
    np.testing.assert_allclose(run(model, inputs), expected, rtol=1e-5, atol=1e-6)


def leading(model: ir.Model) -> dict[str, str]:
    """The leading sizes of what nodes compute, by name."""
    values = [value for node in model.graph for value in node.outputs]
    return {str(value.name): str(value.shape[0]) for value in values if value.shape}


def test_what_other_tokens_need_is_computed_for_all() -> None:
    model = flat(MIXED)
    assert GatherLogitTokens()(model).modified
    sizes = leading(model)
    assert {sizes[name] for name in ("n", "y1", "y2")} == {"tokens"}
    assert {sizes[name] for name in ("l3", "r", "o", "m1", "m2", "s", "p", "y")} == {"kept"}
    gathered = [node for node in model.graph if node.op_type == "Gather"]
    assert len(gathered) == 3  # from the table; what attention gives, and what is added to it


def test_a_choice_among_tokens_that_are_not_flat_stays_as_it_is() -> None:
    model = graph(GATED, HEAD)
    before = list(model.graph)
    assert not GatherLogitTokens()(model).modified
    assert list(model.graph) == before


def test_tokens_in_another_order_are_left_alone() -> None:
    model = flat(GATED)
    for node in model.graph:
        if node.op_type == "Transpose":
            node.attributes["perm"] = ir.AttrInt64s("perm", [2, 1, 0])
    assert not GatherLogitTokens()(model).modified
