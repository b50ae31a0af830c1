"""Pass that lets linears read codes: `x @ Transpose(DequantizeLinear(codes, scales, zeros))`.

1. A linear is found by its module's path; one without a coded weight keeps its float weight, and
   so does one whose weight is computed.
2. A Gemm reads [n, k] as it is (`transB`), a MatMul through a Transpose; x, bias and LoRA stay.
3. A module that the graph calls twice is read twice from the same codes.
4. Codes in another order than x has go back into it behind their product with the scales.
5. Weights that nothing reads any more go.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.coded_weight import CodedWeight, write_coded
from trt_lora.builder.passes.linears import Linear, find_linears, has_module_paths


@dataclass(frozen=True)
class QuantiseLinears(ir.passes.InPlacePass):
    """The pass, for the coded weights of a model."""

    weights: Mapping[str, CodedWeight]  # [n, k] by the path of the linear's module

    def requires(self, model: ir.Model) -> None:
        """The exporter's metadata must still be there."""
        gv.require(has_module_paths(model), "the graph carries no module paths")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        made: dict[str, ir.Value] = {}
        for linear in [item for item in find_linears(model) if item.path in self.weights]:
            if linear.path not in made:
                nodes = write_coded(model.graph, linear.path, self.weights[linear.path])
                model.graph.insert_before(linear.node, nodes)
                made[linear.path] = nodes[-1].outputs[0]
            _read_codes(linear, made[linear.path])
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(made))


def _read_codes(linear: Linear, weight: ir.Value) -> None:
    """Let a linear read a weight [n, k]."""
    if linear.node.op_type == "Gemm":
        linear.node.attributes["transB"] = ir.AttrInt64("transB", 1)
        linear.node.replace_input_with(1, weight)
        return
    transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
    result, (n, k) = transpose.outputs[0], gv.present(weight.shape)
    result.type, result.shape = weight.type, ir.Shape([k, n])
    linear.node.replace_input_with(1, result)
    gv.graph_of(linear.node).insert_before(linear.node, transpose)
