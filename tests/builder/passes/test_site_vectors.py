"""A scale and a bias behind every site, in front of the base model's own bias."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes.insert_lora import InsertLoRA
from trt_lora.builder.passes.remove_lora import RemoveLoRA
from trt_lora.builder.targets import Targets
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.memory.dtypes import Array

Q, R = "h.0.attn.q_proj", 2
RNG = np.random.default_rng(0)
W, X, BIAS = (RNG.random(s, np.float32) for s in ((3, 3), (2, 3), 3))
GIVEN = {
    f"lora_A_{Q}": RNG.random((3, R), np.float32),
    f"lora_B_{Q}": RNG.random((R, 3), np.float32),
    f"lora_scale_{Q}": RNG.random(3, np.float32) + 0.5,
    f"lora_bias_{Q}": RNG.random(3, np.float32),
}
DUMMIES = {name: np.zeros_like(array) for name, array in GIVEN.items()}
DUMMIES[f"lora_scale_{Q}"] += 1

Behind = Callable[[Array, Array], Array]  # what becomes of the sum and the base bias
FORMS: dict[str, tuple[str, Behind]] = {
    "product": ("y = MatMul(x, w) z = Relu(y)", lambda v, b: v),
    "product and bias": ("y = MatMul(x, w) s = Add(y, bias) z = Relu(s)", lambda v, b: v + b),
    "bias inside": ("y = Gemm(x, w, bias) z = Relu(y)", lambda v, b: v + b),
    "residual": ("y = MatMul(x, w) z = Add(x, y)", lambda v, b: X + v),
    "output": ("z = MatMul(x, w)", lambda v, b: v),
    "output with bias": ("z = Gemm(x, w, bias)", lambda v, b: v + b),
    "twice": ("y = MatMul(x, w) z = Mul(y, y)", lambda v, b: v * v),
}


def graph(body: str) -> ir.Model:
    constants = ", ".join(map(str, W.reshape(-1))), ", ".join(map(str, BIAS))
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 3] x) => (float[2, 3] z)
        <float[3, 3] w = {{ {constants[0]} }}, float[3] bias = {{ {constants[1]} }}>
        {{ {body} }}
    """)
    come_from(next(node for node in model.graph if node.op_type in ("MatMul", "Gemm")), Q)
    ShapeInferencePass()(model)
    return model


def insert(model: ir.Model) -> bool:
    return bool(InsertLoRA(Targets.from_names(["attn_q"]), vectors=True)(model).modified)


def run(model: ir.Model, given: dict[str, Array]) -> Array:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    known = {"x": X, **given}
    names = [value.name for value in session.get_inputs()]
    return np.asarray(session.run(None, {name: known[name] for name in names})[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_base_models_bias_comes_behind_scale_and_bias(form: str) -> None:
    body, end = FORMS[form]
    model = graph(body)
    base = run(model, {})
    assert insert(model)
    a, b, scale, bias = GIVEN.values()
    expected = end((X @ W + (X @ a) @ b) * scale + bias, BIAS)
    np.testing.assert_allclose(run(model, GIVEN), np.maximum(expected, 0), rtol=1e-5)
    np.testing.assert_array_equal(run(model, DUMMIES), base)  # they change no bit


@pytest.mark.parametrize("form", FORMS)
def test_the_pass_is_idempotent(form: str) -> None:
    model = graph(FORMS[form][0])
    insert(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not insert(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("form", FORMS)
def test_what_is_removed_leaves_the_base_model(form: str) -> None:
    model = graph(FORMS[form][0])
    base = run(model, {})
    insert(model)
    RemoveLoRA(frozenset(GIVEN))(model)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert not {node.op_type for node in model.graph} & {"LoraDelta1", "LoraAdd1"}
    np.testing.assert_array_equal(run(model, {}), base)


def test_a_module_that_is_called_twice_has_one_pair_of_vectors() -> None:
    model = graph("y = MatMul(x, w) s = Relu(y) z = MatMul(s, w)")
    for node in model.graph:
        if node.op_type == "MatMul":
            come_from(node, Q)
    insert(model)
    assert [value.name for value in model.graph.inputs] == ["x", *GIVEN]
    a, b, scale, bias = GIVEN.values()
    once = np.maximum((X @ W + (X @ a) @ b) * scale + bias, 0)
    twice = (once @ W + (once @ a) @ b) * scale + bias
    np.testing.assert_allclose(run(model, GIVEN), twice, rtol=1e-5)


def test_a_multiple_of_a_bias_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=f"{Q} multiplies its bias; leave out --lora-vectors"):
        insert(graph("y = Gemm<beta = 0.5>(x, w, bias) z = Relu(y)"))
