"""Pass that disables the tiles of ONNX Runtime's attention over a short cache.

1. `com.microsoft.GroupQueryAttention` in float32 over a cache of at most 4,096 positions gets
   sinks [heads] of the lowest float.
2. Left alone is attention in half precision, over a longer cache, or with sinks.

In float32 `com.microsoft.GroupQueryAttention` works through tiles of keys, with products for a
single token that are compiled for SSE alone, unless its heads have sinks (`use_flash` in ONNX
Runtime's group_query_attention.cc). A sink of the lowest float adds exp(lowest - largest score),
which is 0, to a softmax's sum: the result is that without sinks, computed without tiles.
docs/benchmarks/README.md says what that saves, and where.
"""

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.lowering.grouped_query_attention import DOMAIN, OPERATOR

# Without tiles, scores [heads, tokens, positions] lie in memory, and behind some 2,000 positions
# a prompt's no longer fit the processor's caches: a longer cache keeps the tiles.
_LONGEST = 4096

_SINKS = 11  # the place of the sinks [heads] among the operator's inputs
_NOTHING = np.finfo(np.float32).min


class DisableAttentionTiling(ir.passes.InPlacePass):
    """The pass, for a graph that has ONNX Runtime's own attention."""

    def requires(self, model: ir.Model) -> None:
        """Every such attention reads a cache of known type and shape."""
        nodes = [node for node in model.graph if node.op_identifier()[:2] == (DOMAIN, OPERATOR)]
        for cache in (node.inputs[3] for node in nodes):
            gv.require(
                cache is not None and cache.shape is not None, "attention reads an unknown cache"
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; unmodified where no attention is float32 over a short cache."""
        found = [node for node in model.graph if _is_tiled(node)]
        for node in found:
            _give_sinks(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(found))

    def ensures(self, model: ir.Model) -> None:
        """No attention that could be without tiles has them."""
        gv.ensure(not any(map(_is_tiled, model.graph)), "attention has tiles")


def _is_tiled(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, OPERATOR):
        return False
    if len(node.inputs) > _SINKS and node.inputs[_SINKS] is not None:
        return False
    cache = gv.present(node.inputs[3])
    if cache.dtype != ir.DataType.FLOAT or not gv.has_size(cache, 2):
        return False
    return gv.size_of(cache, 2) <= _LONGEST


def _give_sinks(graph: ir.Graph, node: ir.Node) -> None:
    heads = node.attributes["num_heads"].as_int()
    sinks = ir.tensor(np.full(heads, _NOTHING, np.float32))
    constant = ir.node("Constant", [], {"value": sinks})
    graph.insert_before(node, constant)
    node.resize_inputs(_SINKS + 1)
    node.replace_input_with(_SINKS, constant.outputs[0])
