"""Pass that evaluates LoRA nodes in float64, as a reference for plans and runtimes.

1. The body of every LoRA operator casts its operands to float64, but slots and ranks.
2. Its results are rounded once, at the end, to the dtype of x.
"""

import onnx_ir as ir

from trt_lora.plugins.contract.operators import DOMAIN, SLOT_INPUTS


class EvaluateInFloat64(ir.passes.InPlacePass):
    """The pass."""

    def requires(self, model: ir.Model) -> None:
        """The operators have their function bodies."""
        if not any(key[0] == DOMAIN for key in model.functions):
            raise ir.passes.PreconditionError("the model has no LoRA functions")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Widen the bodies in place."""
        for key, function in model.functions.items():
            if key[0] == DOMAIN:
                _widen(function)
        return ir.passes.PassResult(model, modified=True)


def _widen(function: ir.Function) -> None:
    first = function[0]
    for value in function.inputs:
        if value.name in SLOT_INPUTS:  # integers
            continue
        cast = ir.node("Cast", [value], {"to": ir.DataType.DOUBLE})
        cast.outputs[0].name = f"{value.name}_wide"
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        cast.replace_input_with(0, value)  # its own operand was replaced too
        function.insert_before(first, cast)
    for index, value in enumerate(function.outputs):
        narrow = ir.node("CastLike", [value, function.inputs[0]])
        narrow.outputs[0].name = f"{value.name}_rounded"
        function.append(narrow)
        function.outputs[index] = narrow.outputs[0]
