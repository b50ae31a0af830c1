"""Pass that leaves the length of a static cache open.

1. The cache's inputs and outputs have a symbol where the engine's max_seq_len stands.

For ONNX Runtime alone: TensorRT writes in place to a cache of one length.
"""

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.contract.step import CACHE, NEW_CACHE

_LENGTH = "cache_length"


class FreeCacheLength(ir.passes.InPlacePass):
    """The pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the length, which is dimension 2 of [batch, kv_heads, max_len, dim]."""
        values = [
            value
            for value in (*model.graph.inputs, *model.graph.outputs)
            if str(value.name).startswith((CACHE, NEW_CACHE))
        ]
        for value in values:
            batch, heads, _, width = gv.present(value.shape)
            value.shape = ir.Shape([batch, heads, _LENGTH, width])
        return ir.passes.PassResult(model, modified=bool(values))
