"""Pass that lets ONNX Runtime compute attention over a short cache without tiles.

In float32 `com.microsoft.GroupQueryAttention` works through tiles of keys, with products for a
single token that are compiled for SSE alone, unless its heads have sinks (`use_flash` in ONNX
Runtime's group_query_attention.cc). A sink of the lowest float adds exp(lowest - largest score),
which is 0, to a softmax's sum: the result is that without sinks, computed without tiles.
docs/benchmarks/README.md says what that saves, and where.
"""

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes.lowering.grouped_query_attention import DOMAIN, OPERATOR

# Without tiles, scores [heads, tokens, positions] lie in memory, and behind some 2,000 positions
# a prompt's no longer fit the processor's caches: a longer cache keeps the tiles.
_LONGEST = 4096

_SINKS = 11  # the place of the sinks [heads] among the operator's inputs
_NOTHING = np.finfo(np.float32).min


class UntiledAttention(ir.passes.InPlacePass):
    """The pass, for a graph that has ONNX Runtime's own attention."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; unmodified where no attention is float32 over a short cache."""
        found = [node for node in model.graph if _is_tiled(node)]
        for node in found:
            _give_sinks(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(found))


def _is_tiled(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, OPERATOR):
        return False
    cache = node.inputs[3]
    assert cache is not None
    assert cache.shape is not None  # it is an input of the graph
    max_len = cache.shape[2]
    return cache.dtype == ir.DataType.FLOAT and isinstance(max_len, int) and max_len <= _LONGEST


def _give_sinks(graph: ir.Graph, node: ir.Node) -> None:
    heads = node.attributes["num_heads"].as_int()
    sinks = ir.tensor(np.full(heads, _NOTHING, np.float32))
    constant = ir.node("Constant", [], {"value": sinks})
    graph.insert_before(node, constant)
    node.resize_inputs(_SINKS + 1)
    node.replace_input_with(_SINKS, constant.outputs[0])
