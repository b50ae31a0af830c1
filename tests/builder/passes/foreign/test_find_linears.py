"""Linears of graphs by any exporter, written as ONNX text."""

import math
import re

import onnx_ir as ir
import pytest
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes.foreign.find_linears import find_graph_linears, fused_widths
from trt_lora.builder.passes.foreign.names import ModuleNames
from trt_lora.builder.passes.foreign.site_map import SiteMap
from trt_lora.builder.passes.linears import Linear

W = "float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}"
V = "float[4, 3] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}"
FC = "/layers.0/fc/MatMul"


def graph(body: str, *names: str, weights: str = W, inputs: str = "float[2, 3] x") -> ir.Model:
    """A model whose nodes have these names, in their order."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g ({inputs}) => (float[2, n] z) <{weights}> {{ {body} }}
    """)
    for node, name in zip(model.graph, names, strict=False):
        node.name = name
    return model


def found(model: ir.Model, names: ModuleNames | None = None) -> list[Linear]:
    return [*find_graph_linears(model, names or ModuleNames())]


def only(model: ir.Model, names: ModuleNames | None = None) -> Linear:
    (linear,) = found(model, names)
    return linear


@pytest.mark.parametrize(
    ("body", "weights", "k", "n"),
    [
        ("z = MatMul(x, w)", W, 3, 4),
        ("z = Gemm(x, w)", W, 3, 4),
        ("z = Gemm <transB = 1> (x, v)", V, 3, 4),
        ("z = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, v, b)", f"{V}, float[4] b", 3, 4),
        ("t = Transpose <perm = [1, 0]> (v) z = MatMul(x, t)", V, 3, 4),
        ("t = Transpose (v) z = MatMul(x, t)", V, 3, 4),
        ("t = Identity (w) z = MatMul(x, t)", W, 3, 4),
        ("t = Cast <to = 1> (h) z = MatMul(x, t)", "float16[3, 4] h", 3, 4),
        ("t = DequantizeLinear (q, s) z = MatMul(x, t)", "int8[3, 4] q, float s", 3, 4),
        (
            "t = DequantizeLinear <axis = 0, block_size = 2> (q, s) z = MatMul(x, t)",
            "int4[4, 6] q, float[2, 6] s",
            4,
            6,
        ),
        (
            "t = DequantizeLinear (q, s) z = Gemm <transB = 1> (x, t)",
            "float8e4m3fn[4, 3] q, float s",
            3,
            4,
        ),
        (
            "t = DequantizeLinear (q, s) u = Cast <to = 1> (t) p = Transpose (u) z = MatMul(x, p)",
            "int8[4, 3] q, float16 s",
            3,
            4,
        ),
        (
            "z = com.microsoft.MatMulNBits <K = 32, N = 4, bits = 4, block_size = 32> (x, q, s)",
            "uint8[4, 1, 16] q, float[4] s",
            32,
            4,
        ),
    ],
)  # fmt: skip
def test_a_weight_is_seen_through_what_exporters_put_between(
    body: str, weights: str, k: int, n: int
) -> None:
    model = graph(body, weights=with_values(weights))
    [*model.graph][-1].name = FC
    linear = only(model)
    assert (linear.path, linear.k, linear.n, linear.refusal) == ("layers.0.fc", k, n, "")
    assert linear.y.dtype == ir.DataType.FLOAT


def with_values(weights: str) -> str:
    """ONNX text wants values of every initializer; zeros do, of as many as its shape has."""

    def value(match: re.Match[str]) -> str:
        if "=" in match[0]:
            return match[0]
        sizes = [int(size) for size in (match["sizes"] or "").split(",") if size]
        zeros = ", ".join("0" for _ in range(math.prod(sizes)))
        return f"{match[0]} = {{{zeros}}}"

    return re.sub(r"\w+(\[(?P<sizes>[\d, ]+)\])? \w+( = \{[^}]*\})?", value, weights)


def test_a_reshaped_weight_has_its_new_shape() -> None:
    body = "t = Reshape (flat, shape) z = MatMul(x, t)"
    weights = with_values("float[12] flat") + ", int64[2] shape = {3, 4}"
    model = graph(body, "", FC, weights=weights)
    model.graph[0].outputs[0].shape = ir.Shape([3, 4])  # as shape inference writes it
    assert (only(model).k, only(model).n) == (3, 4)


@pytest.mark.parametrize(
    ("body", "weights", "reason"),
    [
        ("z = MatMul(x, x)", W, "its second operand is not a constant weight"),
        ("z = MatMul(x, c)", with_values("float[2, 3, 4] c"), "its weight has 3 dimensions, not 2"),
        (
            "z = Conv <group = 3> (x, c)",
            with_values("float[3, 1, 1, 1] c"),
            "it is a convolution of 3 groups",
        ),
    ],
)
def test_what_takes_no_lora_says_why(body: str, weights: str, reason: str) -> None:
    assert only(graph(body, FC, weights=weights)).refusal.startswith(reason)


def test_a_weight_that_a_run_may_replace_is_none() -> None:
    model = graph("z = MatMul(x, w)", FC, inputs="float[2, 3] x, float[3, 4] w")
    assert "an input of the graph too" in only(model).refusal


def test_a_vector_and_codes_as_input_are_refused() -> None:
    vector = graph("z = MatMul(x, w)", FC, inputs="float[3] x")
    assert only(vector).refusal == "its input is a vector"
    codes = "f = DequantizeLinear (x, s) z = MatMul(f, w)"
    model = graph(codes, "", FC, weights=f"{W}, float s = {{1}}", inputs="int8[2, 3] x")
    assert only(model).refusal == "its input is INT8, and its weight FLOAT"


# -------------------------------------------------------------------------------------------- names


def test_metadata_comes_before_the_node_and_the_node_before_the_weight() -> None:
    model = graph("z = MatMul(x, w)", "/b/MatMul")
    node = model.graph[0]
    rename(model, "w", "c.weight")
    assert only(model).path == "b"
    node.name = "node_MatMul_12"
    assert only(model).path == "c"
    node.name = "/b/MatMul"
    come_from(node, "a")
    assert only(model).path == "a"


def test_a_slice_of_modules_is_no_path() -> None:
    model = graph("z = MatMul(x, w)")
    come_from(model.graph[0], "layers.slice(1, None, None).0")
    assert only(model).refusal.startswith("nothing in the graph names its module")
    rename(model, "w", "layers.1.weight")
    assert only(model).path == "layers.1"


def rename(model: ir.Model, old: str, new: str) -> None:
    model.graph.initializers[old].name = new


@pytest.mark.parametrize(
    ("node", "path"),
    [
        ("/model/layers.0/fc1/MatMul", "model.layers.0.fc1"),
        ("/model/layers.0/fc1/MatMul_1", "model.layers.0.fc1"),
        ("/model/layers.1/attn/qkv_proj/MatMul_Q4", "model.layers.1.attn.qkv_proj"),
        ("/net/net.0/Gemm", "net.0"),  # a Sequential is called, and so are its items
        ("/down_blocks.0/ff/net.0/proj/MatMul", "down_blocks.0.ff.net.0.proj"),
        ("/MatMul", ""),
        ("node_MatMul_12", ""),
        ("MatMul_7", ""),
        ("layers/fc/weight", ""),
        ("", ""),
    ],
)
def test_the_scope_in_a_nodes_name(node: str, path: str) -> None:
    linear = only(graph("z = MatMul(x, w)", node))
    assert linear.path == path or (not path and linear.refusal.startswith("nothing in the graph"))


@pytest.mark.parametrize(
    ("weight", "path"),
    [
        ("h.0.fc.weight", "h.0.fc"),
        ("h.0.q_proj.MatMul.weight", "h.0.q_proj"),
        ("h.0.q_proj.MatMul.weight_Q4", "h.0.q_proj"),
        ("h.0.fc.bias", ""),
        ("onnx::MatMul_123", ""),
        ("val_12", ""),
        ("fc.weight_transposed", ""),
        ("/h/fc.weight", ""),
    ],
)
def test_the_path_in_a_weights_name(weight: str, path: str) -> None:
    model = graph("z = MatMul(x, w)")
    rename(model, "w", weight)
    assert only(model).path == path or (not path and only(model).refusal)


def test_a_bias_names_nothing() -> None:
    body, weights = "z = Gemm(x, w, b)", f"{W}, float[4] b = {{1, 2, 3, 4}}"
    model = graph(body, weights=weights)
    rename(model, "b", "h.0.fc.bias")
    assert only(model).path == "z"  # its output, for the list
    assert only(model).refusal.startswith("nothing in the graph names its module")


def test_two_calls_of_one_module_are_one_site_by_their_scopes() -> None:
    body = "a = MatMul(x, w) b = MatMul(a, v) z = MatMul(b, w)"
    both = found(graph(body, "/fc/MatMul", "/other/MatMul", "/fc/MatMul_1", weights=f"{W}, {V}"))
    assert [(each.path, each.refusal) for each in both] == [("fc", ""), ("other", ""), ("fc", "")]


def test_torchscript_numbers_the_second_call_of_a_module() -> None:
    body = "a = MatMul(x, w) b = Relu(x) z = MatMul(b, w)"
    both = found(graph(body, "/block/fc/MatMul", "", "/block_1/fc/MatMul"))
    assert [(each.path, each.refusal) for each in both] == [("block.fc", "")] * 2
    two = found(graph(body, "/block/fc_1/MatMul", "", "/block/fc_2/MatMul"))  # not of fc_1
    assert all(each.refusal.startswith("its weight is read by ") for each in two)


@pytest.mark.parametrize("names", [("/one/MatMul", "", "/two/MatMul"), ("", "", "")])
def test_a_weight_of_two_modules_or_of_unknown_ones_is_no_site(names: tuple[str, ...]) -> None:
    body = "a = MatMul(x, w) b = Relu(x) z = MatMul(b, w)"
    model = graph(body, *names)
    rename(model, "w", "fc.weight")
    for linear in found(model):
        assert linear.refusal.startswith("its weight is read by ")


def test_a_weight_that_a_branch_reads_too_is_no_site() -> None:
    branch = "g1 () => (float[2, 4] t) { t = MatMul(x, w) }"
    other = "g2 () => (float[2, 4] e) { e = Identity(y) }"
    body = f"y = MatMul(x, w) z = If (c) <then_branch = {branch}, else_branch = {other}>"
    inputs = "float[2, 3] x, bool c"
    refusals = [each.refusal for each in found(graph(body, FC, inputs=inputs))]
    assert len(refusals) == 2
    assert all(refusals)
    assert "it is inside another node's subgraph" in refusals


def test_a_path_of_two_weights_is_no_site() -> None:
    body = "a = MatMul(x, w) z = MatMul(a, v)"
    model = graph(body, "/attn/MatMul", "/attn/MatMul_1", weights=f"{W}, {V}")
    assert {each.refusal for each in found(model)} == {"2 weights have this path"}


def test_linears_without_a_name_are_listed_each_by_its_own_label() -> None:
    linears = found(graph("a = MatMul(x, w) z = MatMul(a, v)", weights=f"{W}, {V}"))
    assert [each.path for each in linears] == ["a", "z"]
    assert all(each.refusal.startswith("nothing in the graph names") for each in linears)


def test_a_module_of_another_class_is_no_linear() -> None:
    model = graph("z = MatMul(x, w)")
    come_from(model.graph[0], "pos", "models.Rotary")
    assert only(model).refusal == "its module is a models.Rotary, not a linear"


def test_a_prefix_and_a_site_map_rename_paths_and_name_nodes() -> None:
    site_map = SiteMap({r"attn\.": "self_attn.", r"node_MatMul_(\d+)": r"late.\1"})
    names = ModuleNames("model", site_map)
    assert only(graph("z = MatMul(x, w)", "/0/attn/q/MatMul"), names).path == "model.0.self_attn.q"
    assert only(graph("z = MatMul(x, w)", "node_MatMul_7"), names).path == "late.7"


def test_attention_of_onnxruntime_tells_the_parts_of_a_fused_linear() -> None:
    attention = "com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>"
    weights = with_values("float[3, 16] w") + ", float[16] b = {" + ", ".join("0" * 16) + "}"
    body = f"y = MatMul(x, w) s = Add(y, b) z = {attention} (s, , , x, x, l, l)"
    model = graph(body, FC, weights=weights, inputs="float[2, 3] x, int32 l")
    assert fused_widths(only(model)) == (8, 4, 4)
    assert fused_widths(only(graph("y = MatMul(x, w) z = Relu(y)", FC))) == ()
