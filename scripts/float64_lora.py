"""The LoRA nodes of an engine's ONNX graph in float64: what a plan or a runtime should compute."""

import onnx_ir as ir

from trt_lora.plugins.operator import DOMAIN


def evaluate_in_float64(model: ir.Model) -> None:
    """Make the operators' bodies cast to float64 and round once, at the end; in place."""
    for key, function in model.functions.items():
        if key[0] == DOMAIN:
            _widen(function)


def _widen(function: ir.Function) -> None:
    first = function[0]
    for value in function.inputs:
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
