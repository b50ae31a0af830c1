"""Which linears share a LoRA node, in which form; every form computes the same in ONNX Runtime."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes.insert_lora import InsertLoRA
from trt_lora.builder.passes.lora_function import lora_function
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.operators import DOMAIN, OPERATORS, Operator, operator_named
from trt_lora.plugins.contract.sites import MAX_SITES

Array = npt.NDArray[np.float32]

SIZE = 4  # of every linear
PATHS = {name: f"h.0.attn.{name}_proj" for name in ("q", "k", "v", "o")}
SHAPE = f"float[2, {SIZE}]"


def graph(body: str, outputs: str, inputs: str = "") -> ir.Model:
    """A graph whose MatMuls are linears; W_<name> and b are constants."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g ({SHAPE} x{inputs}) => ({outputs}) {{ {body} }}
    """)
    values = {v.name: v for node in model.graph for v in node.inputs if v is not None}
    for number, (name, value) in enumerate(values.items()):
        if str(name).startswith("W_") or name == "b":
            shape = (SIZE,) if name == "b" else (SIZE, SIZE)
            array = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
            value.const_value = ir.tensor(array, name=name)
            model.graph.register_initializer(value)
    for node in model.graph:
        if node.op_type == "MatMul":
            come_from(node, PATHS[str(node.outputs[0].name).partition("_")[0]])
    ShapeInferencePass()(model)
    return model


def nodes_of(model: ir.Model) -> list[str]:
    """The operators that the pass inserts."""
    InsertLoRA(Targets.from_names(["all-linear"]))(model)
    return [node.op_type for node in model.graph if node.domain == DOMAIN]


def run(model: ir.Model, feeds: dict[str, Array]) -> list[Array]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return [np.asarray(output) for output in session.run(None, feeds)]


def feeds_of(model: ir.Model, rank: int, scale: float) -> dict[str, Array]:
    """Random inputs; A and B of that rank, times a scale."""
    rng = np.random.default_rng(rank)
    feeds = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        sizes = [size if isinstance(size, int) else rank for size in value.shape]
        factor = scale if str(value.name).startswith("lora_") else 1.0
        feeds[str(value.name)] = (factor * rng.standard_normal(sizes)).astype(np.float32)
    return feeds


def merged(model: ir.Model, feeds: dict[str, Array]) -> ir.Model:
    """The graph without LoRA, its weights with A @ B added."""
    for node in model.graph:
        if node.op_type == "MatMul":
            path = PATHS[str(node.outputs[0].name).partition("_")[0]]
            weight = node.inputs[1]
            assert weight is not None
            assert weight.const_value is not None
            delta = feeds[f"lora_A_{path}"] @ feeds[f"lora_B_{path}"]
            weight.const_value = ir.tensor(weight.const_value.numpy() + delta, name=weight.name)
    return model


QKV = "q = MatMul(x, W_q) k = MatMul(x, W_k) v = MatMul(x, W_v)"
CASES = {
    # name: body, outputs, other inputs, the operators
    "elementwise work follows": (f"{QKV} s = Add(q, k) z = Mul(s, v)", "z", "", ["LoraDelta3"]),
    "elementwise work follows views": (
        "q = MatMul(x, W_q) t = Transpose(q) z = Relu(t)",
        "z",
        "",
        ["LoraDelta1"],
    ),
    "nothing follows": (QKV, "q, k, v", "", ["LoraAdd3"]),
    "a product follows": ("q = MatMul(x, W_q) o = MatMul(q, W_o)", "o", "", ["LoraAdd1"] * 2),
    "the residual follows": ("o = MatMul(x, W_o) z = Add(r, o)", "z", "r", ["LoraAdd1"]),
    "the residual follows a bias": (
        "o_y = MatMul(x, W_o) y = Add(o_y, b) z = Add(y, r)",
        "z",
        "r",
        ["LoraAdd1"],
    ),
    "a residual that broadcasts": (
        "o = MatMul(x, W_o) z = Add(o, row)",
        "z",
        "row",
        ["LoraDelta1"],
    ),
    "the residual and another reader": (
        "o = MatMul(x, W_o) z = Add(o, r) e = Exp(o)",
        "z, e",
        "r",
        ["LoraDelta1"],
    ),
    "the output added to itself": ("o = MatMul(x, W_o) z = Add(o, o)", "z", "", ["LoraDelta1"]),
    "a bias, then work": (
        "q_y = MatMul(x, W_q) y = Add(q_y, b) z = Tanh(y)",
        "z",
        "",
        ["LoraDelta1"],
    ),
    "an output and elementwise work": (
        "q = MatMul(x, W_q) z = Exp(q)",
        "q, z",
        "",
        ["LoraDelta1"],
    ),
    "two values to read": (
        "q = MatMul(x, W_q) e = Exp(x) k = MatMul(e, W_k) z = Mul(q, k)",
        "z",
        "",
        ["LoraDelta1"] * 2,
    ),
    "one value behind Identity": (
        "i = Identity(x) q = MatMul(x, W_q) k = MatMul(i, W_k) z = Mul(q, k)",
        "z",
        "",
        ["LoraDelta2"],
    ),
    "readers between the linears": (
        "q = MatMul(x, W_q) o = MatMul(q, W_o) k = MatMul(x, W_k)",
        "o, k",
        "",
        ["LoraAdd2", "LoraAdd1"],
    ),
}


def model_of(case: str) -> ir.Model:
    body, outputs, more, _ = CASES[case]
    kinds = {"r": SHAPE, "row": f"float[1, {SIZE}]"}
    typed = ", ".join(f"float[a, c] {name}" for name in outputs.split(", "))
    return graph(body, typed, f", {kinds[more]} {more}" if more else "")


@pytest.mark.parametrize("case", CASES)
def test_the_form_of_a_node_follows_from_the_graph(case: str) -> None:
    assert sorted(nodes_of(model_of(case))) == sorted(CASES[case][3])


@pytest.mark.parametrize("case", CASES)
def test_every_form_computes_what_merged_weights_compute(case: str) -> None:
    model = model_of(case)
    nodes_of(model)
    feeds = feeds_of(model, rank=3, scale=0.5)
    names = {name: array for name, array in feeds.items() if not name.startswith("lora_")}
    expected = run(merged(model_of(case), feeds), names)
    for ours, theirs in zip(run(model, feeds), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_dummies_change_no_value(case: str) -> None:
    model = model_of(case)
    nodes_of(model)
    feeds = feeds_of(model, rank=1, scale=0.0)
    names = {name: array for name, array in feeds.items() if not name.startswith("lora_")}
    for ours, theirs in zip(run(model, feeds), run(model_of(case), names), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("count", [1, MAX_SITES, MAX_SITES + 1, 2 * MAX_SITES + 3])
def test_a_large_group_is_several_nodes(count: int) -> None:
    body = " ".join(f"q_{i} = MatMul(x, W_{i}) e_{i} = Exp(q_{i})" for i in range(count))
    outputs = ", ".join(f"float[a, c] e_{i}" for i in range(count))
    model = graph(body, outputs)
    for number, node in enumerate(n for n in model.graph if n.op_type == "MatMul"):
        come_from(node, f"h.{number}.attn.q_proj")
    sizes = [operator_named(name) for name in nodes_of(model)]
    assert sum(operator.sites for operator in sizes if operator) == count
    assert len(sizes) == -(-count // MAX_SITES)


# ------------------------------------------------------------------------------------ the operators


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_the_function_of_an_operator_is_its_meaning(operator: Operator) -> None:
    function = lora_function(operator, 18)
    assert (function.domain, function.name) == (DOMAIN, operator.name)
    assert tuple(value.name for value in function.inputs) == operator.input_names
    assert len(function.outputs) == operator.sites
    one = ["MatMul", "MatMul", *(["Add"] if operator.has_addend else [])]
    assert [node.op_type for node in function] == one * operator.sites
    assert operator_named(operator.name) == operator


@pytest.mark.parametrize("name", ["Lora", "Lora3", "LoraAdd", "LoraAdd0", "LoraDelta9", "loraAdd1"])
def test_other_names_are_no_operators(name: str) -> None:
    assert operator_named(name) is None
