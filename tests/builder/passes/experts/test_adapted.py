"""Experts with LoRA in standard operators, against their definition in float64."""

from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.tape import Tape

from trt_lora.builder.passes.experts import looped, lowered
from trt_lora.builder.passes.experts.adapted import AdaptExperts
from trt_lora.builder.passes.experts.lowered import EXPERTS, expert_bytes
from trt_lora.builder.passes.linears import EXPERTS_DOMAIN
from trt_lora.builder.passes.lora_function import lora_function
from trt_lora.plugins.contract.operators import COLUMNS, DOMAIN, DOMAIN_VERSION, EXPERTS_OPERATOR

COUNT, TOP, WIDTH, INNER, SLOTS, RANKS = 12, 2, 16, 8, 3, {"up": 4, "down": 3}
FACTORS = ("a_up", "b_up", "a_down", "b_down")
Floats = npt.NDArray[np.float32]


def inputs(tokens: int, *, slots: bool = False) -> dict[str, Any]:
    """Everything that a node reads, by name; without slots each factor has the first one's."""
    rng = np.random.default_rng(tokens)
    sizes = {"up": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}
    found: dict[str, Any] = {
        "x": rng.standard_normal((tokens, WIDTH), np.float32),
        "chosen": np.array([rng.permutation(COUNT)[:TOP] for _ in range(tokens)]),
        "shares": rng.uniform(0, 1, (tokens, TOP)).astype(np.float32),
        "gate_up": rng.standard_normal((COUNT, 2 * INNER, WIDTH), np.float32) / 4,
        "down": rng.standard_normal((COUNT, WIDTH, INNER), np.float32) / 4,
    }
    for name, (k, n) in sizes.items():
        shapes = {"a": (SLOTS, COUNT, k, RANKS[name]), "b": (SLOTS, COUNT, RANKS[name], n)}
        for factor, shape in shapes.items():
            stack = rng.standard_normal(shape, np.float32) / 4
            found[f"{factor}_{name}"] = stack if slots else stack[0]
    if slots:
        found["slot"] = (np.arange(tokens) % (SLOTS + 1) - 1).astype(np.int32)
        found["rank"] = np.repeat(np.array([[4, 3]] * SLOTS, np.int32), COUNT, axis=0)
    return found


def expected(given: dict[str, Any]) -> npt.NDArray[np.float64]:
    """By the definition, token by token."""
    wide = {name: np.asarray(value, np.float64) for name, value in given.items()}
    found = np.zeros(given["x"].shape)
    for token, place in np.ndindex(*given["chosen"].shape):
        expert, slot = given["chosen"][token, place], given.get("slot", [None] * len(found))[token]
        a_up, b_up, a_down, b_down = (
            (0.0 * wide[name][0, expert] if slot < 0 else wide[name][slot, expert])
            if slot is not None
            else wide[name][expert]
            for name in FACTORS
        )
        x = wide["x"][token]
        gate, up = np.split(wide["gate_up"][expert] @ x + x @ a_up @ b_up, 2)
        acted = gate / (1 + np.exp(-gate)) * up
        y = wide["down"][expert] @ acted + acted @ a_down @ b_down
        found[token] += wide["shares"][token, place] * y
    return found


def run(
    given: dict[str, Any],
    *,
    at_a_time: int = COUNT,
    left_out: tuple[str, ...] = (),
    in_loops: bool = False,
) -> Floats:
    """Lower one node and run it."""
    tokens, weights = len(given["x"]), ("gate_up", "down")
    values = {}
    for name, array in given.items():
        kind = ir.DataType.from_numpy(array.dtype)
        sizes = ["t" if name in ("x", "chosen", "shares", "slot") else None, *array.shape[1:]]
        tensor = ir.tensor(array, name=name) if name in weights else None
        shape = array.shape if tensor else ir.Shape(sizes)
        values[name] = ir.val(name, kind, shape, const_value=tensor)
    tape = Tape()
    operands = [None if name in left_out else value for name, value in values.items()]
    y = tape.op(EXPERTS, operands, {COLUMNS: [0, 1]}, domain=EXPERTS_DOMAIN)
    y.name, y.type, y.shape = "y", values["x"].type, ir.Shape(["t", WIDTH])
    given_in = [value for name, value in values.items() if name not in (*weights, *left_out)]
    opsets = {"": 24, EXPERTS_DOMAIN: 1, DOMAIN: DOMAIN_VERSION}
    body = ir.Graph(
        given_in,
        [y],
        nodes=tape.nodes,
        initializers=[values[name] for name in weights],
        opset_imports=opsets,
    )
    model = ir.Model(body, ir_version=10)
    function = lora_function(EXPERTS_OPERATOR, 24)
    model.functions[function.identifier()] = function
    with patch.object(lowered, "MOST_BYTES", at_a_time * expert_bytes(tokens, INNER, 4)):
        assert AdaptExperts(tokens, in_loops)(model).modified
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    feeds = {str(value.name): given[str(value.name)] for value in given_in}
    return np.asarray(session.run(None, feeds)[0])


def check(found: Floats, right: npt.NDArray[np.float64]) -> None:
    assert np.abs(found - right).max() / np.abs(right).max() < 1e-6


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])  # up to two tokens are few
@pytest.mark.parametrize("at_a_time", [COUNT, 5])
@pytest.mark.parametrize("slots", [False, True])
def test_both_forms_compute_the_definition(tokens: int, at_a_time: int, *, slots: bool) -> None:
    given = inputs(tokens, slots=slots)
    check(run(given, at_a_time=at_a_time), expected(given))


@pytest.mark.parametrize("tokens", [1, 6, 7, 40])  # up to six are few
@pytest.mark.parametrize("block", [1 << 20, 200, 1])  # bytes: one of all rows, of some, of each
def test_loops_compute_the_definition(tokens: int, block: int) -> None:
    given = inputs(tokens)
    with patch.object(looped, "BLOCK_BYTES", block):
        check(run(given, in_loops=True), expected(given))


@pytest.mark.parametrize("left_out", [FACTORS[:2], FACTORS[2:]])
def test_one_of_the_two_matrices_may_take_none(left_out: tuple[str, ...]) -> None:
    given = inputs(3)
    without = given | {name: np.zeros_like(given[name]) for name in left_out}
    check(run(given, left_out=left_out), expected(without))
