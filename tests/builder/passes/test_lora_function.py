"""The bodies of operators with slots, in ONNX Runtime, against float64 and against themselves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

from trt_lora.builder.passes.float64_lora import EvaluateInFloat64
from trt_lora.builder.passes.lora_function import lora_function
from trt_lora.plugins.contract.operators import DOMAIN, DOMAIN_VERSION, EXPERTS_OPERATOR, Operator

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int32]

SLOTS, RANK, K, WIDTHS = 5, 16, 300, (72, 40)
RANKS = (16, 1, 7, 0, 12)  # of the adapter in each slot; 0: there is none
# What each of eight rows takes.
MIXES = {
    "identical": [2] * 8,
    "distinct": [0, 1, 2, 4, -1, 3, 4, 0],
    "uniform": [0, 1, 2, 3, 4, 0, 1, 2],
    "one base row": [1, 1, -1, 4, 0, 0, 2, 1],
    "all base": [-1] * 8,
}
CHANGES: dict[str, Callable[[ir.Model], object]] = {
    "as built": lambda model: None,
    "float64": lambda model: EvaluateInFloat64()(model),
}


def session(operator: Operator, change: Callable[[ir.Model], object]) -> Any:
    """A model of one node whose inputs and outputs are the operator's."""
    floats, integers = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT32)
    inputs = [ir.val(name, type=floats) for name in operator.input_names]
    for value in inputs[1:3]:
        value.type = integers
    node = ir.Node(DOMAIN, operator.name, inputs, num_outputs=operator.sites, name="lora")
    for index, output in enumerate(node.outputs):
        output.name, output.type = f"d_{index}", floats
    imports = {"": 18, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name="one")
    model = ir.Model(graph, ir_version=10)
    function = lora_function(operator, 18)
    model.functions[function.identifier()] = function
    change(model)
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())


@pytest.fixture(scope="module", params=[False, True], ids=["delta", "add"])
def operator(request: pytest.FixtureRequest) -> Operator:
    return Operator(len(WIDTHS), has_addend=request.param, has_slots=True)


@pytest.fixture(scope="module")
def built(operator: Operator) -> Any:
    return session(operator, CHANGES["as built"])


def operands(operator: Operator, tokens: int = 3, room: int = RANK) -> dict[str, Any]:
    """Eight rows of tokens, and stacks of rank `room`, zero behind each adapter's rank."""
    rng = np.random.default_rng(0)
    ranks = [rank * room // RANK for rank in RANKS]

    def values(*shape: int) -> Floats:
        return rng.standard_normal(shape, np.float32)

    found: dict[str, Any] = {
        "x": values(8, tokens, K),
        "rank": np.tile(np.array(ranks, np.int32)[:, None], 2),
    }
    for site, n in enumerate(WIDTHS):
        found |= {f"a_{site}": values(SLOTS, K, room), f"b_{site}": values(SLOTS, room, n)}
        for slot, rank in enumerate(ranks):
            found[f"a_{site}"][slot, :, rank:] = found[f"b_{site}"][slot, rank:] = 0
        if operator.has_addend:
            found[f"c_{site}"] = values(8, tokens, n)
    return found


def of_tokens(slots: list[int], tokens: int = 3) -> Slots:
    return np.repeat(np.array(slots, np.int32), tokens)


def run(built: Any, given: dict[str, Any], slots: list[int]) -> list[Floats]:
    tokens = given["x"].shape[1]
    return [np.asarray(d) for d in built.run(None, given | {"slot": of_tokens(slots, tokens)})]


def expected(operator: Operator, given: dict[str, Any], slots: list[int], site: int) -> Any:
    """The definition, row by row, in float64."""
    addend = given[f"c_{site}"] if operator.has_addend else np.zeros((8, 1, WIDTHS[site]))
    rows = []
    for x, c, slot in zip(given["x"], addend, slots, strict=True):
        a, b = (given[f"{factor}_{site}"][slot].astype(np.float64) for factor in "ab")
        rows.append(c + (x @ a @ b if slot >= 0 else np.zeros((len(x), WIDTHS[site]))))
    return np.array(rows)


@pytest.mark.parametrize("slots", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_row_gets_the_delta_of_its_adapter(
    operator: Operator, slots: list[int], change: Callable[[ir.Model], object]
) -> None:
    given = operands(operator)
    found = run(session(operator, change), given, slots)
    for site, delta in enumerate(found):
        right = expected(operator, given, slots, site)
        assert delta.shape == right.shape
        np.testing.assert_allclose(delta, right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("slots", [*MIXES.values(), [SLOTS, 1] * 4], ids=[*MIXES, "no slot"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("tokens", [1, 3])  # few for so many slots, and many
def test_rows_of_experts_get_the_same(
    tokens: int, change: Callable[[ir.Model], object], slots: list[int]
) -> None:
    every = operands(EXPERTS_OPERATOR, tokens)
    given = {name: every[name] for name in EXPERTS_OPERATOR.input_names if name != "slot"}
    (found,) = run(session(EXPERTS_OPERATOR, change), given, slots)
    known = [slot if slot < SLOTS else -1 for slot in slots]
    right = expected(EXPERTS_OPERATOR, given, known, 0)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-3)


def test_a_base_row_gets_exactly_nothing(operator: Operator, built: Any) -> None:
    given = operands(operator)
    for site, delta in enumerate(run(built, given, MIXES["one base row"])):
        nothing = given[f"c_{site}"][2] if operator.has_addend else np.zeros_like(delta[2])
        assert np.array_equal(delta[2], nothing)


def test_what_overflows_with_a_neighbours_adapter_stays_with_the_neighbour(
    operator: Operator, built: Any
) -> None:
    given, slots = operands(operator), MIXES["distinct"]
    before = run(built, given, slots)
    given["a_0"][0] = 3e38  # finite, but x @ A is infinite, or no number, on every token
    for site, (old, new) in enumerate(zip(before, run(built, given, slots), strict=True)):
        others = [row for row, slot in enumerate(slots) if slot != 0 or site == 1]
        assert np.array_equal(old[others], new[others])
        assert np.isfinite(new[0]).all() == (site == 1)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("room", [16, 32, 64, 256])
def test_no_bit_of_a_row_depends_on_the_others_or_on_its_slot(
    operator: Operator, built: Any, tokens: int, room: int
) -> None:
    given, slots = operands(operator, tokens, room), MIXES["distinct"]
    before = run(built, given, slots)
    order = [3, 0, 4, 1, 2]  # the adapter in slot i moves to order.index(i)
    moved = dict(given)
    for name in ("a_0", "b_0", "a_1", "b_1"):
        moved[name] = given[name][order]
    others = np.arange(8) % 2 == 1
    moved["x"] = np.where(others[:, None, None], given["x"] * 2, given["x"])
    places = [-1 if slot < 0 else order.index(slot) for slot in slots]
    changed = [2 if other else place for other, place in zip(others, places, strict=True)]
    for old, new in zip(before, run(built, moved, changed), strict=True):
        assert np.array_equal(old[~others], new[~others])
        assert not np.array_equal(old[others], new[others])


def test_a_step_may_bind_only_the_slots_that_its_rows_take(operator: Operator, built: Any) -> None:
    given, slots = operands(operator), [2, 2, -1, 1, 2, 1, -1, 2]
    part = {name: a[1:3] if name[0] in "abr" else a for name, a in given.items()}
    whole = run(built, given, slots)
    narrow = run(built, part, [slot - 1 if slot >= 0 else slot for slot in slots])
    for old, new in zip(whole, narrow, strict=True):
        assert np.array_equal(old, new)
