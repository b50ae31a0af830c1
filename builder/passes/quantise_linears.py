"""Pass that lets linears read codes: `x @ Transpose(DequantizeLinear(codes, scales, zeros))`.

1. A linear is found by its module's path; one without a coded weight keeps its float weight, and
   so does one whose weight is computed.
2. A Gemm reads [n, k] as it is (`transB`), a MatMul through a Transpose; x, bias and LoRA stay.
3. A module that the graph calls twice is read twice from the same codes.
4. Codes in another order than x has go back into it behind their product with the scales.
5. x is rounded to E4M3, NVFP4 or 8 bits where a weight says so, once for all linears that read it;
   LoRA reads it as it was.
6. An embedding that is tied to a linear reads rows of its codes of 8 bits, too; of 4 bits it keeps
   its floats, because answers would move.
7. Weights that nothing reads any more go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_products import CodedX
from trt_lora.builder.passes.codes.coded_weight import CodedWeight, write_coded
from trt_lora.builder.passes.linears import Linear, find_linears, has_module_paths, module_path

_ROW_BITS = 8


@dataclass(frozen=True)
class QuantiseLinears(ir.passes.InPlacePass):
    """The pass, for the coded weights of a model."""

    weights: Mapping[str, CodedWeight]  # [n, k] by the path of the linear's module
    tied: Mapping[str, str] = field(default_factory=dict)  # path of an embedding by its linear's

    def requires(self, model: ir.Model) -> None:
        """The exporter's metadata must still be there."""
        gv.require(has_module_paths(model), "the graph carries no module paths")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        made, coded_x = dict[str, ir.Value](), CodedX(model)
        for linear in [item for item in find_linears(model) if item.path in self.weights]:
            if linear.path not in made:
                nodes = write_coded(model.graph, linear.path, self.weights[linear.path])
                model.graph.insert_before(linear.node, nodes)
                made[linear.path] = nodes[-1].outputs[0]
            if (weight := self.weights[linear.path]).x_scale is not None:
                linear.node.replace_input_with(0, coded_x.rounded(linear.node, weight))
            _read_codes(linear, made[linear.path])
            if linear.path in self.tied and weight.bits == _ROW_BITS:
                _read_rows(model, self.tied[linear.path], made[linear.path])
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(made))


def _read_rows(model: ir.Model, embedding: str, weight: ir.Value) -> None:
    """Let the Gather of an embedding read a weight, which is made in front of it from now on."""
    node, made = weight.producer(), [n for n in model.graph if _is_table(n, embedding)]
    if node is not None and node.op_type != "Gather" and len(made) == 1:
        model.graph.remove(node)
        model.graph.insert_before(made[0], node)
        made[0].replace_input_with(0, weight)


def _is_table(node: ir.Node, embedding: str) -> bool:
    return node.op_type == "Gather" and module_path(node) == embedding


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
