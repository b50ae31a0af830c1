"""The model that adds up weights is the one that its comment says."""

import onnx
import pytest

from trt_lora.runtime.engines.onnxruntime.exp_sums import MODEL

pytestmark = pytest.mark.needs_torch

TEXT = """<ir_version: 8, opset_import: ["" : 13]>
s (float[n,v] x, float[n,1] base) => (float[n,b] y)
<int64[3] shape = {0,-1,256}, int64[1] axis = {2}> {
    d = Sub(x, base)
    e = Exp(d)
    r = Reshape(e, shape)
    y = ReduceSum<keepdims=0>(r, axis)
}"""


def test_the_bytes_are_those_of_the_text() -> None:
    assert onnx.parser.parse_model(TEXT).SerializeToString() == MODEL
    onnx.checker.check_model(onnx.load_from_string(MODEL))
