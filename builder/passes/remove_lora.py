"""Pass that removes LoRA from a graph, for comparison with the plain base model.

1. What read a node's result reads what the delta was added to.
2. A delta by itself goes with the Add that it met.
3. Where the operators' functions were inlined, the same is done to the products of B.
4. The sum with the product of an embedding's B goes in the same way.
5. What read a product or sum with a vector of a site reads its other operand.
6. LoRA inputs, what is computed of slots and the operators' functions go; weights and everything
   else stay.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.contract.operators import DOMAIN, operator_named
from trt_lora.runtime.files.file_record import file_record
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    ONNX_CPU_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    read_manifest,
)

_PRODUCTS = ("MatMul", "Gemm")
# What may stand between a delta and its sum: of the experts of a token, or of channels first.
_BEFORE_SUM = ("ReduceSum", "Transpose")


@dataclass(frozen=True)
class RemoveLoRA(ir.passes.InPlacePass):
    """The pass."""

    bindings: frozenset[str]  # names of the engine's LoRA inputs

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Take LoRA out in place."""
        nodes = [node for node in model.graph if node.domain == DOMAIN]
        products = [node for node in model.graph if self._expands(node)]
        for node in nodes:
            operator = gv.present(operator_named(node.op_type))
            for site, result in enumerate(node.outputs):
                addend = node.inputs[operator.addend(site)] if operator.has_addend else None
                _bypass(result, addend)
        for node in products:
            _bypass(node.outputs[0], node.inputs[2] if node.op_type == "Gemm" else None)
        scaled = [node for node in model.graph if self._vector_place(node) is not None]
        for node in scaled:
            _bypass(node.outputs[0], node.inputs[1 - gv.present(self._vector_place(node))])
        RemoveUnusedNodesPass()(model)
        for value in [value for value in model.graph.inputs if value.name in self.bindings]:
            model.graph.inputs.remove(value)
            model.graph.initializers.pop(str(value.name), None)
        for function in [key for key in model.functions if key[0] == DOMAIN]:
            del model.functions[function]
        return ir.passes.PassResult(model, modified=bool(nodes or products))

    def _expands(self, node: ir.Node) -> bool:
        """Whether a node is the product with a B, behind that with its A or rows of it."""
        if node.op_type not in _PRODUCTS:
            return False
        below = node.inputs[1].producer() if node.inputs[1] else None
        if below is not None and below.op_type == "Reshape":  # of an embedding's stack of B
            return self._is_factor(below.inputs[0])
        shrink = node.inputs[0].producer() if node.inputs[0] else None
        if shrink is None or not self._is_factor(node.inputs[1]):
            return False
        if shrink.op_type == "Gather":
            return self._is_factor(shrink.inputs[0])
        # A `Gemm` with B can feed the next A.
        return shrink.op_type == "MatMul" and self._is_factor(shrink.inputs[1])

    def _vector_place(self, node: ir.Node) -> int | None:
        """Which operand of a product or sum is a vector, or rows of a stack of them."""
        for place, value in enumerate(node.inputs) if node.op_type in ("Mul", "Add") else ():
            gather = None if value is None else value.producer()
            if gather is not None and gather.op_type == "Gather":
                value = gather.inputs[0]
            if value is not None and value.name in self.bindings:
                return place
        return None

    def _is_factor(self, value: ir.Value | None) -> bool:
        return value is not None and value.name in self.bindings

    def ensures(self, model: ir.Model) -> None:
        """No node and no input of LoRA is left."""
        if any(node.domain == DOMAIN for node in model.graph):
            raise ir.passes.PostconditionError("a LoRA node is left")
        if left := self.bindings & {str(value.name) for value in model.graph.inputs}:
            raise ir.passes.PostconditionError(f"LoRA inputs are left: {sorted(left)}")


def engine_without_lora(engine: Path, directory: Path) -> Path:
    """Write the ONNX files of `engine` without LoRA nodes and inputs to the folder `directory`.

    The weights are copied: ONNX Runtime refuses a link that leads out of the folder. The result has
    no sites and no plan; ONNX Runtime runs the same form of the graph as of `engine`.
    """
    manifest = read_manifest(engine)
    graphs = [name for name in (ONNX_FILE, ONNX_CPU_FILE) if name in manifest.files]
    for name in graphs:
        model = ir.load(engine / name)
        RemoveLoRA(manifest.lora_inputs)(model)
        ir.save(model, directory / name)
    shutil.copyfile(engine / ONNX_WEIGHTS_FILE, directory / ONNX_WEIGHTS_FILE)
    inputs = tuple(b for b in manifest.inputs if b.name not in manifest.lora_inputs)
    files = {name: file_record(directory / name) for name in (*graphs, ONNX_WEIGHTS_FILE)}
    plain = replace(
        manifest,
        sites=(),
        inputs=inputs,
        profiles={},
        files=files,
        flavour="none",
        second_stream=False,
        max_loras=0,
        lora_vectors=False,
        saved_modules=(),
        matrices={},
    )
    (directory / MANIFEST_FILE).write_text(plain.to_json(), encoding="utf-8")
    return directory


def _bypass(result: ir.Value, addend: ir.Value | None) -> None:
    """Make readers of a sum with the delta read the other addend.

    Args:
        result: the sum, or the delta that an `Add` alone reads.
        addend: of the sum; None of the delta.
    """
    if addend is None:
        ((add, index),) = result.uses()
        while add.op_type in _BEFORE_SUM:
            ((add, index),) = add.outputs[0].uses()
        result, addend = add.outputs[0], add.inputs[1 - index]
    gv.replace_value(result, gv.present(addend))
