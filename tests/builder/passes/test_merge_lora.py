"""W + A @ B in every form that a linear's weight has, and nowhere else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from trt_lora.builder.passes.merge_lora import MergeLoRA
from trt_lora.builder.passes.site_calls import site_calls
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.bench.llama import llama_manifest

W = np.arange(9, dtype=np.float32).reshape(3, 3)
X, A, B = map(np.random.default_rng(0).standard_normal, [(2, 3), (3, 2), (2, 3)])
MANIFEST = replace(llama_manifest("float32"), sites=(Site("s", 3, 3, "float32"),))
HEADER = """<ir_version: 10, opset_import: ["" : 18, "trt_lora" : 1]>
agraph (float[2,3] x, float[3,r] lora_A_s, float[r,3] lora_B_s) => (float[2,3] y, float[3,3] same)
<float[3,3] w = {0, 1, 2, 3, 4, 5, 6, 7, 8}> { same = Identity(w) """


def merged(body: str, folder: Path, *, zero: bool = False) -> tuple[Array, Array, ir.Model]:
    """Merge A and B into a graph; return its y, the weight as others read it, and the model."""
    model = ir.from_onnx_text(HEADER + body + "}")
    inputs = {"lora_A_s": A * (not zero), "lora_B_s": B}
    MergeLoRA(MANIFEST, inputs, folder / "new.data")(model)
    ir.save(model, folder / "m.onnx")
    session = onnxruntime.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["x"]
    y, same = session.run(["y", "same"], {"x": X.astype(np.float32)})
    return np.asarray(y), np.asarray(same), model


@pytest.mark.parametrize(
    ("linear", "weight"),
    [
        ("m = MatMul(x, w)", W),
        ("m = Gemm <transB = 1> (x, w)", W.T),
        ("m = Gemm <alpha = 0.5> (x, w)", 0.5 * W),
        ("t = Transpose <perm = [1, 0]> (w) m = MatMul(x, t)", W.T),
        ("t = Transpose(w) m = Gemm <transB = 1, alpha = 4.0> (x, t)", 4 * W),
    ],
)
def test_a_linear_gets_the_delta_and_other_readers_of_its_weight_do_not(
    linear: str, weight: Array, tmp_path: Path
) -> None:
    y, same, _ = merged(f"{linear} y = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, m)", tmp_path)
    np.testing.assert_allclose(y, X @ (weight + A @ B), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(same, W)


def test_a_merged_linear_reads_x_without_its_rounding_to_codes(tmp_path: Path) -> None:
    y, _, _ = merged(
        "s = Constant <value_float = 0.5> () q = QuantizeLinear(x, s) d = DequantizeLinear(q, s) "
        "m = MatMul(d, w) y = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, m)",
        tmp_path,
    )
    np.testing.assert_allclose(y, X @ (W + A @ B), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "bias"), [(2, 0), (1, 0.5)])
def test_vectors_are_not_merged(scale: float, bias: float, tmp_path: Path) -> None:
    body = "m = MatMul(x, w) y = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, m)"
    model, ones = ir.from_onnx_text(HEADER + body + "}"), np.ones(3)
    inputs = {
        "lora_A_s": A,
        "lora_B_s": B,
        "lora_scale_s": scale * ones,
        "lora_bias_s": bias * ones,
    }
    manifest = replace(MANIFEST, lora_vectors=True)
    with pytest.raises(ModelError, match="is set: DoRA and biases are not merged"):
        MergeLoRA(manifest, inputs, tmp_path / "new.data")(model)


def test_a_module_that_is_called_twice_is_merged_once(tmp_path: Path) -> None:
    y, _, _ = merged(
        "a = MatMul(x, w) b = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, a) c = MatMul(b, w) "
        "y = trt_lora.LoraAdd1(b, lora_A_s, lora_B_s, c)",
        tmp_path,
    )
    both = W + A @ B
    np.testing.assert_allclose(y, X @ both @ both, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "new.data").stat().st_size == W.nbytes


def test_a_delta_beside_a_residual_finds_its_linear(tmp_path: Path) -> None:
    y, _, _ = merged(
        "m = MatMul(x, w) z = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, x) y = Add(m, z)", tmp_path
    )
    np.testing.assert_allclose(y, X @ (W + A @ B) + X, rtol=1e-4, atol=1e-5)


def test_dummies_change_no_weight_and_write_none(tmp_path: Path) -> None:
    body = "m = MatMul(x, w) d = trt_lora.LoraDelta1(x, lora_A_s, lora_B_s) y = Add(m, d)"
    y, _, model = merged(body, tmp_path, zero=True)
    np.testing.assert_allclose(y, X @ W, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "new.data").stat().st_size == 0
    assert list(model.graph.initializers) == ["w"]


def test_a_weight_that_nothing_reads_any_more_is_dropped(tmp_path: Path) -> None:
    text = HEADER.replace(", float[3,3] same", "").replace("same = Identity(w)", "")
    body = "m = MatMul(x, w) y = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, m) }"
    model = ir.from_onnx_text(text + body)
    MergeLoRA(MANIFEST, {"lora_A_s": A, "lora_B_s": B}, tmp_path / "new.data")(model)
    assert list(model.graph.initializers) == ["merged_0_s"]


def test_a_graph_of_another_release_is_refused() -> None:
    model = ir.from_onnx_text(HEADER + "y = trt_lora.Lora(x, lora_A_s, lora_B_s) }")
    with pytest.raises(ModelError, match="build the engine again"):
        list(site_calls(model))
    model = ir.from_onnx_text(HEADER + "y = trt_lora.LoraAdd1(x, lora_A_s, lora_B_s, x) }")
    with pytest.raises(ModelError, match="the linear of s is not beside"):
        list(site_calls(model))
