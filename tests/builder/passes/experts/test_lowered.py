"""Experts in both forms, against their definition in float64."""

from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.tape import Tape
from support.refusals import refused

from trt_lora.builder.passes.experts import lowered
from trt_lora.builder.passes.experts.lowered import (
    EXPERTS,
    FuseExperts,
    InterleaveExperts,
    StandardExperts,
    expert_bytes,
)
from trt_lora.builder.passes.linears import EXPERTS_DOMAIN
from trt_lora.plugins.errors import ConfigError

COUNT, TOP, WIDTH, INNER = 12, 2, 16, 8  # so that up to two tokens are few
TOKENS = (1, 2, 3, 40)
Floats = npt.NDArray[np.floating]


def wide(values: Floats) -> npt.NDArray[np.float64]:
    return np.asarray(values, np.float64)


class Case(NamedTuple):
    """What goes in."""

    x: Floats
    chosen: npt.NDArray[np.int64]
    shares: Floats
    gate_up: Floats
    down: Floats

    def expected(self) -> npt.NDArray[np.float64]:
        """By the definition."""
        x, shares, found = wide(self.x), wide(self.shares), np.zeros(self.x.shape)
        gate_up, down = wide(self.gate_up), wide(self.down)
        for token, place in np.ndindex(*self.chosen.shape):
            expert = self.chosen[token, place]
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            acted = gate / (1 + np.exp(-gate)) * up
            found[token] += shares[token, place] * (down[expert] @ acted)
        return found


def case(tokens: int, dtype: type[np.floating] = np.float32) -> Case:
    rng = np.random.default_rng(tokens)
    chosen = np.array([rng.permutation(COUNT - 1)[:TOP] for _ in range(tokens)])  # never the last
    shares = rng.uniform(0.1, 3, (tokens, TOP))  # that add up to anything
    shares[0, 0] = 0
    return Case(
        rng.normal(size=(tokens, WIDTH)).astype(dtype),
        chosen.astype(np.int64),
        shares.astype(dtype),
        (rng.normal(size=(COUNT, 2 * INNER, WIDTH)) / 4).astype(dtype),
        (rng.normal(size=(COUNT, WIDTH, INNER)) / 4).astype(dtype),
    )


def graph(known: Case) -> ir.Model:
    """Experts as the trace leaves them, with weights as initializers."""
    kind = ir.DataType.from_numpy(known.x.dtype)
    inputs = [
        ir.val("x", kind, ["t", known.x.shape[1]]),
        ir.val("chosen", ir.DataType.INT64, ["t", known.chosen.shape[1]]),
        ir.val("shares", kind, ["t", known.shares.shape[1]]),
    ]
    weights = [
        ir.val(name, kind, value.shape, const_value=ir.tensor(value, name=name))
        for name, value in (("gate_up", known.gate_up), ("down", known.down))
    ]
    tape = Tape()
    y = tape.op(EXPERTS, [*inputs, *weights], domain=EXPERTS_DOMAIN)
    y.name, y.type, y.shape = "y", ir.TensorType(kind), ir.Shape(["t", known.x.shape[1]])
    opsets = {"": 24, EXPERTS_DOMAIN: 1}
    body = ir.Graph(inputs, [y], nodes=tape.nodes, initializers=weights, opset_imports=opsets)
    model = ir.Model(body, ir_version=10)
    assert InterleaveExperts()(model).modified
    return model


def run(model: ir.Model, known: Case) -> Floats:
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    given = {"x": known.x, "chosen": known.chosen, "shares": known.shares}
    return np.asarray(session.run(None, given)[0])


def error(found: Floats, known: Case) -> float:
    expected = known.expected()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("tokens", TOKENS)
def test_onnx_runtimes_own_operator_computes_the_definition(tokens: int) -> None:
    known = case(tokens)
    model = graph(known)
    assert FuseExperts()(model).modified
    assert [node.op_type for node in model.graph if node.domain] == ["MoE"]
    StandardExperts(tokens)(model)
    assert error(run(model, known), known) < 1e-6


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("at_a_time", [COUNT, 5, 1])
def test_standard_operators_compute_the_definition(tokens: int, at_a_time: int) -> None:
    known = case(tokens)
    model = graph(known)
    room = at_a_time * expert_bytes(tokens, INNER, 4)
    with patch.object(lowered, "MOST_BYTES", room):
        StandardExperts(tokens)(model)
    (choice,) = [node for node in model.graph if node.op_type == "If"]
    products = [
        [node.op_type for node in branch.as_graph()].count("MatMul")
        for branch in choice.attributes.values()
    ]
    assert products == [2, 2 * -(-COUNT // at_a_time)]
    assert error(run(model, known), known) < 1e-6


@pytest.mark.parametrize("lowered", [FuseExperts(), StandardExperts(40)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_half_precision_stays_close(tokens: int, lowered: ir.passes.InPlacePass) -> None:
    known = case(tokens, np.float16)
    model = graph(known)
    lowered(model)
    StandardExperts(tokens)(model)
    assert error(run(model, known), known) < 0.01


def test_a_dtype_that_the_operator_does_not_take_is_left_to_standard_operators() -> None:
    model = graph(case(1))
    (node,) = model.graph
    x = node.inputs[0]
    assert x is not None
    x.type = ir.TensorType(ir.DataType.BFLOAT16)
    assert not FuseExperts()(model).modified
    assert [node.op_type for node in model.graph] == [EXPERTS]


def test_both_forms_read_the_same_weights() -> None:
    fused, standard = graph(case(1)), graph(case(1))
    FuseExperts()(fused)
    StandardExperts(1)(standard)
    for name, value in fused.graph.initializers.items():
        ours, theirs = value.const_value, standard.graph.initializers[name].const_value
        assert ours is not None
        assert theirs is not None
        assert ours.tobytes() == theirs.tobytes()


def test_memory_stays_below_a_gigabyte_for_a_large_mixture() -> None:
    """A prompt of 1,024 tokens at the sizes of Qwen3-30B-A3B: 128 experts of width 768."""
    tokens, experts, width, top = 1024, 128, 768, 8
    x, shares = np.zeros((1, 4), np.float32), np.ones((1, top), np.float32)
    gate_up, down = np.zeros((experts, 2 * width, 4)), np.zeros((experts, 4, width))
    weights = gate_up.astype(np.float32), down.astype(np.float32)
    model = graph(Case(x, np.zeros((1, top), np.int64), shares, *weights))
    StandardExperts(tokens)(model)
    (choice,) = [node for node in model.graph if node.op_type == "If"]
    dense = choice.attributes["else_branch"].as_graph()
    constants = [each.attributes["value"] for each in dense if each.op_type == "Constant"]
    shapes = [value.as_tensor().numpy() for value in constants]
    counts = [int(shape[1]) for shape in shapes if shape.size == 4]  # [tokens, experts, width, 2]
    assert sum(counts) == experts
    assert len(counts) > 1
    assert tokens * max(counts) * width * 3 * 4 <= 1 << 30
    model = graph(Case(x, np.zeros((1, top), np.int64), shares, *weights))
    with refused(ConfigError, "of width 768 takes 1,207,959,552 bytes", "--max-input-len"):
        StandardExperts(1 << 17)(model)
