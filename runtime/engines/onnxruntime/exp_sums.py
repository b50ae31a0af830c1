"""Weights of logits, added up by ONNX Runtime: in a third of numpy's time without AVX-512."""

from typing import Any

import numpy as np

from trt_lora.runtime.engines.host_topk import BLOCK
from trt_lora.runtime.engines.topk import Logits

# An ONNX model of IR version 8 and opset 13, x [n, v] and base [n, 1] float32, y [n, v / 256]:
#   d = Sub(x, base), e = Exp(d), r = Reshape(e, (0, -1, 256)), y = ReduceSum(r, axis 2)
MODEL = (
    b"\x08\x08:\xdf\x01\n\x13\n\x01x\n\x04base\x12\x01d\"\x03Sub:\x00\n\r\n\x01d\x12\x01e\"\x03Exp:"
    b"\x00\n\x18\n\x01e\n\x05shape\x12\x01r\"\x07Reshape:\x00\n*\n\x01r\n\x04axis\x12\x01y\""
    b"\tReduceSum*\x0f\n\x08keepdims\x18\x00\xa0\x01\x02:\x00\x12\x01s*\x1a\x08\x03\x10\x07:\r\x00"
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x80\x02B\x05shape*\r\x08\x01\x10\x07:\x01\x02B\x04axis"
    b"Z\x15\n\x01x\x12\x10\n\x0e\x08\x01\x12\n\n\x03\x12\x01n\n\x03\x12\x01vZ\x17\n\x04base\x12\x0f"
    b"\n\r\x08\x01\x12\t\n\x03\x12\x01n\n\x02\x08\x01b\x15\n\x01y\x12\x10\n\x0e\x08\x01\x12\n\n\x03"
    b"\x12\x01n\n\x03\x12\x01bB\x04\n\x00\x10\r"
)  # fmt: skip


class OnnxRuntimeExpSums:
    """An `ExpSums`, which runs in the thread that asks; any number of them may."""

    def __init__(self) -> None:
        """Load the model."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(
            MODEL, options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, values: Logits, bases: Logits) -> Logits:
        """Return the sums; see `ExpSums`."""
        if padding := -values.shape[1] % BLOCK:
            values = np.pad(values, ((0, 0), (0, padding)), constant_values=-np.inf)
        sums: Logits = self._session.run(None, {"x": values, "base": bases[:, None]})[0]
        return sums
