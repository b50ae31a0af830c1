"""Pass that gives LoRA inputs a default of rank 0, so that ONNX Runtime runs without them."""

import numpy as np
import onnx_ir as ir

from trt_lora.plugins.contract.operators import DOMAIN, operator_named


class OptionalLoRA(ir.passes.InPlacePass):
    """The pass; stacks of adapters stay as they are."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the defaults in place."""
        factors = [factor for node in model.graph for factor in _factors(node)]
        for value in factors:
            assert value.shape is not None  # the insertion pass gives one,
            assert value.dtype is not None  # and a type
            sizes = [size if isinstance(size, int) else 0 for size in value.shape]
            default = np.zeros(sizes, value.dtype.numpy())
            value.const_value = ir.tensor(default, name=value.name)
            model.graph.register_initializer(value)
        return ir.passes.PassResult(model, modified=bool(factors))


def _factors(node: ir.Node) -> list[ir.Value]:
    operator = operator_named(node.op_type) if node.domain == DOMAIN else None
    if operator is None or operator.has_slots:
        return []
    places = [place for site in range(operator.sites) for place in operator.factors(site)]
    return [value for place in places if (value := node.inputs[place]) is not None]
