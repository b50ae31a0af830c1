"""Norms of a trace as one node each."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from support.models.static_graphs import with_constants

from trt_lora.builder.passes.lowering.rms_norms import RMSNorms

SIZE, EPSILON = 24, 1e-3
GAIN = np.random.default_rng(1).standard_normal(SIZE)
_CORE = """
  squares = Pow(wide, two)
  mean = ReduceMean<keepdims = 1>(squares, last_axis)
  shifted = Add(mean, epsilon)
  root = Sqrt(shifted)
  inverse_root = Reciprocal(root)
  normed = Mul(wide, inverse_root)
"""
LLAMA = {  # float16 is narrowed before it is scaled
    "float": f"wide = Identity(x) {_CORE} y = Mul(gain, normed)",
    "float16": f"wide = Cast<to = 1>(x) {_CORE} back = Cast<to = 10>(normed) y = Mul(gain, back)",
}
GEMMA = f"wide = Cast<to = 1>(x) {_CORE} scaled = Mul(normed, wide_gain) y = Cast<to = 10>(scaled)"


def norm(body: str, dtype: str, **constants: npt.NDArray[np.generic]) -> ir.Model:
    """A norm of x [batch, 3, SIZE]."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 24]>
        g ({dtype}[batch, 3, {SIZE}] x) => ({dtype}[batch, 3, {SIZE}] y) {{ {body} }}
    """)
    kind = np.float16 if dtype == "float16" else np.float32
    numbers = {
        "two": np.array(2, np.float32),
        "epsilon": np.array(EPSILON, np.float32),
        "gain": GAIN.astype(kind),
        "wide_gain": GAIN.astype(np.float32),
    }
    return with_constants(model, numbers | constants)


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def answer(model: ir.Model, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(session.run(None, {"x": x})[0], np.float64)


@pytest.mark.parametrize(
    ("body", "dtype", "left"),
    [
        (LLAMA["float"].replace("Identity(x)", "Add(x, x)"), "float", 2),
        (LLAMA["float16"], "float16", 1),
        (GEMMA, "float16", 3),
    ],
)
def test_a_norm_is_one_node_that_computes_in_float32(body: str, dtype: str, left: int) -> None:
    model = norm(body, dtype)
    x = np.random.default_rng(0).standard_normal((2, 3, SIZE))
    x = (x * 200).astype(np.float16 if dtype == "float16" else np.float32)  # squares overflow
    before = answer(model, x)
    RMSNorms()(model)
    assert kinds(model).count("RMSNormalization") == 1
    assert len(kinds(model)) == left
    exact = x.astype(np.float64) * (2 if "Add(x, x)" in body else 1)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPSILON) * GAIN
    found, step = answer(model, x), float(np.finfo(x.dtype).eps)
    np.testing.assert_allclose(found, exact, rtol=3 * step)
    np.testing.assert_allclose(found, before, rtol=3 * step)


@pytest.mark.parametrize(
    ("change", "constants"),
    [
        (("last_axis", "axis_1"), {}),  # another axis
        (("two", "three"), {"three": np.array(3, np.float32)}),  # another power
        (("gain", "gain"), {"gain": GAIN[:1].astype(np.float32)}),  # one gain for all
        (("gain", "gain"), {"gain": np.ones((3, SIZE), np.float32)}),  # gains of another axis too
    ],
)
def test_another_norm_stays_as_it_is(
    change: tuple[str, str], constants: dict[str, npt.NDArray[np.generic]]
) -> None:
    model = norm(LLAMA["float"].replace(*change), "float", **constants)
    before = kinds(model)
    RMSNorms()(model)
    assert kinds(model) == before
