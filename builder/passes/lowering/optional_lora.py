"""Pass that gives LoRA inputs a default of rank 0, so that ONNX Runtime runs without them.

1. Every A [k, rank] and B [rank, n] that a LoRA node reads becomes an input with an initializer,
   [k, 0] and [0, n].
2. Stacks of adapters are left alone: their slots say which tokens take none.
"""

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.contract.operators import operator_named


class OptionalLoRA(ir.passes.InPlacePass):
    """The pass."""

    def requires(self, model: ir.Model) -> None:
        """The factors are inputs of the graph whose type and shape are known."""
        for value in (factor for node in model.graph for factor in _factors(node)):
            is_known = value.shape is not None and value.dtype is not None
            gv.require(value.is_graph_input() and is_known, f"{value.name} is no known input")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the defaults in place."""
        factors = [factor for node in model.graph for factor in _factors(node)]
        for value in factors:
            sizes = [size if isinstance(size, int) else 0 for size in gv.present(value.shape)]
            default = np.zeros(sizes, gv.present(value.dtype).numpy())
            value.const_value = ir.tensor(default, name=value.name)
            model.graph.register_initializer(value)
        return ir.passes.PassResult(model, modified=bool(factors))

    def ensures(self, model: ir.Model) -> None:
        """Every factor has a default without values."""
        for value in (factor for node in model.graph for factor in _factors(node)):
            default = value.const_value
            gv.ensure(default is not None and default.size == 0, f"{value.name} has no default")


def _factors(node: ir.Node) -> list[ir.Value]:
    operator = operator_named(node.op_type)
    return [] if operator is None or operator.has_slots else gv.factors(node)
