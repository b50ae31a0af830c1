"""The insertion pass, on graphs written as ONNX text."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass
from support.models.exporter_metadata import LINEAR, come_from

from trt_lora.builder.passes.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import ConfigError, ModelError


def graph(body: str, paths: dict[str, str], *, output: str = "z", kind: str = LINEAR) -> ir.Model:
    """A model whose named nodes come from the modules at `paths`, as the exporter would say it."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 3] x) => (float[2, n] {output})
        <float[3, 4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
         float[4, 3] v = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
         float[2, 4] w2 = {{1, 2, 3, 4, 5, 6, 7, 8}}>
        {{ {body} }}
    """)
    for node in model.graph:
        path = paths.get(str(node.outputs[0].name))
        if path is not None:
            come_from(node, path, kind)
    ShapeInferencePass()(model)
    return model


def insert(
    model: ir.Model, *targets: str, names: BindingNames = BindingNames.LORA, head: str = ""
) -> InsertLoRAResult:
    """Run the pass, with its own checks before and after."""
    result = InsertLoRA(Targets.from_names(targets), names, head)(model)
    assert isinstance(result, InsertLoRAResult)
    return result


def run(model: ir.Model, **feeds: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The model's output in ONNX Runtime; inputs that are not given are rank-1 zeros."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    known = {"x": x} | feeds
    zeros = {
        item.name: np.zeros([d if isinstance(d, int) else 1 for d in item.shape], np.float32)
        for item in session.get_inputs()
        if item.name not in known
    }
    (output,) = session.run(None, known | zeros)
    return np.asarray(output)


def adapts(model: ir.Model, output: str, *paths: str) -> bool:
    """Whether ones as A and B change a graph output as they should if base and x are positive."""
    ones = {
        str(value.name): np.ones([s if isinstance(s, int) else 1 for s in value.shape], np.float32)
        for value in model.graph.inputs
        if value.shape is not None and str(value.name).endswith(paths)
    }
    assert [value.name for value in model.graph.outputs] == [output]
    return len(ones) == 2 * len(paths) and not np.array_equal(run(model, **ones), run(model))


def input_names(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.inputs]


Q = "h.0.attn.q_proj"


def test_a_linear_gets_two_inputs_with_a_rank_symbol_of_its_own() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    result = insert(model, "attn_q")
    assert result.modified
    (site,) = result.sites
    assert (site.path, site.k, site.n, site.dtype, site.layer) == (Q, 3, 4, "float32", 0)
    shapes = {str(v.name): str(v.shape) for v in model.graph.inputs}
    assert shapes[f"lora_A_{Q}"] == f"[3,rank_{Q}]"
    assert shapes[f"lora_B_{Q}"] == f"[rank_{Q},4]"


def test_the_result_is_base_plus_x_a_b() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    base = run(model)
    insert(model, "attn_q")
    rng = np.random.default_rng(0)
    a, b = rng.random((3, 2), np.float32), rng.random((2, 4), np.float32)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    adapted = run(model, **{f"lora_A_{Q}": a, f"lora_B_{Q}": b})
    np.testing.assert_allclose(adapted, base + (x @ a) @ b, rtol=1e-6)
    assert np.array_equal(run(model), base)  # rank-1 zeros change no bit


def test_every_reader_of_a_linear_reads_the_adapted_value() -> None:
    model = graph("y = MatMul(x, w) z = Mul(y, y)", {"y": Q})
    base = run(model)
    insert(model, "attn_q")
    ones = {f"lora_A_{Q}": np.ones((3, 1), np.float32), f"lora_B_{Q}": np.ones((1, 4), np.float32)}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = (np.sqrt(base) + x.sum(axis=1, keepdims=True)) ** 2
    np.testing.assert_allclose(run(model, **ones), expected, rtol=1e-6)


def test_a_linear_that_is_a_graph_output_keeps_the_outputs_name() -> None:
    model = graph("z = MatMul(x, w)", {"z": Q})
    insert(model, "attn_q")
    (output,) = model.graph.outputs
    assert output.name == "z"
    assert adapts(model, "z", Q)


def test_a_module_called_twice_is_one_site_with_one_pair_of_inputs() -> None:
    body = "a = MatMul(x, w) b = MatMul(a, v) c = MatMul(b, w) z = Relu(c)"
    model = graph(body, {"a": Q, "c": Q})
    result = insert(model, "attn_q")
    assert len(result.sites) == 1
    assert input_names(model) == ["x", f"lora_A_{Q}", f"lora_B_{Q}"]
    lora = [node for node in model.graph if node.domain == DOMAIN]
    assert len(lora) == 2
    assert lora[0].name != lora[1].name


def test_a_module_called_with_two_shapes_is_refused() -> None:
    body = "a = MatMul(x, w) b = MatMul(a, v) z = Relu(b)"
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.q_proj is called as"):
        insert(graph(body, {"a": Q, "b": Q}), "attn_q")


def test_the_pass_is_idempotent() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    first = insert(model, "attn_q")
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    second = insert(model, "attn_q")
    assert not second.modified
    assert second.sites == first.sites
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_names_that_the_graph_has_already_are_not_used_again() -> None:
    body = "y = MatMul(x, w) y_lora = Relu(y) z = Relu(y_lora)"
    model = graph(body, {"y": Q})
    insert(model, "attn_q")
    names = [str(value.name) for node in model.graph for value in node.outputs]
    assert len(names) == len(set(names))
    assert run(model).shape == (2, 4)


def test_a_graph_without_module_paths_is_refused() -> None:
    with pytest.raises(ir.passes.PreconditionError, match=r"strips metadata"):
        insert(graph("y = MatMul(x, w) z = Relu(y)", {}), "attn_q")


def test_a_target_without_a_layer_is_refused_with_those_there_are() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    with pytest.raises(ConfigError, match=r"no layer for .* 'attn_qkv'; it has: attn_q$"):
        insert(model, "attn_qkv")
    assert input_names(model) == ["x"]


def test_what_is_left_alone_says_why() -> None:
    body = "y = MatMul(x, w) t = Transpose(y) s = MatMul(y, t) u = MatMul(y, v) z = Relu(u)"
    paths = {"y": Q, "s": "h.0.attn", "u": "lm_head"}
    result = insert(graph(body, paths), "all-linear", head="lm_head")
    assert [site.path for site in result.sites] == [Q]
    assert [(item.path, item.reason) for item in result.left_alone] == [
        ("h.0.attn", "its second operand is not a constant weight"),
        ("lm_head", "it is the output head"),
    ]


def test_a_module_that_is_not_targeted_is_left_alone() -> None:
    body = "y = MatMul(x, w) u = MatMul(y, v) z = Relu(u)"
    result = insert(graph(body, {"y": Q, "u": "h.0.mlp.down_proj"}), "q_proj")
    assert [item.reason for item in result.left_alone] == ["mlp_4h_to_h is not a target"]


def test_a_product_whose_module_is_no_linear_is_left_alone() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q}, kind="torch.nn.RotaryEmbedding")
    with pytest.raises(ConfigError, match=r"no layer"):
        insert(model, "attn_q")


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        ("y = Gemm(x, w)", (3, 4)),
        ("y = Gemm<transB = 1>(x, v)", (3, 4)),
        ("t = Transpose(v) y = MatMul(x, t)", (3, 4)),
        ("t = Transpose<perm = [1, 0]>(v) y = MatMul(x, t)", (3, 4)),
    ],
)
def test_a_weight_may_be_transposed(node: str, shape: tuple[int, int]) -> None:
    model = graph(f"{node} z = Relu(y)", {"y": Q})
    (site,) = insert(model, "attn_q").sites
    assert (site.k, site.n) == shape
    a, b = np.ones((3, 5), np.float32), np.ones((5, 4), np.float32)
    delta = run(model, **{f"lora_A_{Q}": a, f"lora_B_{Q}": b}) - run(model)
    assert np.array_equal(delta, np.array([[15.0] * 4, [60.0] * 4], np.float32))


def test_a_transposed_input_is_left_alone() -> None:
    body = "y = MatMul(x, w) k = Gemm<transA = 1>(x, w2) z = Relu(y)"
    result = insert(graph(body, {"y": Q, "k": "h.0.attn.k_proj"}), "attn_q")
    assert ("h.0.attn.k_proj", "its input is transposed") in [
        (item.path, item.reason) for item in result.left_alone
    ]


def test_edgellm_names_are_used_when_asked_for() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    insert(model, "attn_q", names=BindingNames.EDGELLM)
    assert input_names(model) == ["x", f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"]
    assert f"[3,{Q}.rank]" in str(model.graph.inputs[1].shape)


def test_a_target_that_the_graph_has_lost_is_refused_by_name() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    lost = "h.0.attn.k_proj"
    insertion = InsertLoRA(Targets.from_names(["all-linear"]), modules={Q: True, lost: True})
    with pytest.raises(ModelError, match=rf"^{lost} is not in the exported graph"):
        insertion(model)


def test_a_target_that_the_logits_do_not_need_is_left_alone() -> None:
    model = graph("y = MatMul(x, w) z = Relu(y)", {"y": Q})
    insertion = InsertLoRA(Targets.from_names(["all-linear"]), modules={Q: True, "pooler": False})
    result = insertion(model)
    assert isinstance(result, InsertLoRAResult)
    assert [(item.path, item.reason) for item in result.left_alone] == [
        ("pooler", "the logits do not depend on it")
    ]
