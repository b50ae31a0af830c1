"""Pass that removes LoRA from a graph, for comparison with the plain base model.

1. What read a node's result reads what the delta was added to.
2. A delta by itself goes with the Add that it met.
3. Where the operators' functions were inlined, the same is done to the products of B.
4. LoRA inputs, what is computed of slots and the operators' functions go; weights and everything
   else stay.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.plugins.contract.operators import DOMAIN, Operator, operator_named
from trt_lora.runtime.files.file_record import file_record
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    ONNX_CPU_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    read_manifest,
)

_PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class RemoveLoRA(ir.passes.InPlacePass):
    """The pass."""

    bindings: frozenset[str]  # names of the engine's LoRA inputs

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Take LoRA out in place."""
        nodes = [node for node in model.graph if node.domain == DOMAIN]
        for node in nodes:
            operator = operator_named(node.op_type)
            assert operator is not None  # the insertion pass makes no other
            for site in range(operator.sites):
                _bypass(operator, node, site)
            slots = [value for value in node.inputs[1:3] if operator.has_slots and value]
            model.graph.remove(node, safe=True)
            for value in slots:
                _drop(value)
        products = [node for node in model.graph if self._expands(node)]
        for node in products:
            _bypass_product(node)
        for value in [value for value in model.graph.inputs if value.name in self.bindings]:
            model.graph.inputs.remove(value)
            model.graph.initializers.pop(str(value.name), None)
        model.functions.clear()
        return ir.passes.PassResult(model, modified=bool(nodes or products))

    def _expands(self, node: ir.Node) -> bool:
        """Whether a node is the product with a B, behind that with its A."""
        if node.op_type not in _PRODUCTS or not self._reads_factor(node):
            return False
        shrink = node.inputs[0].producer() if node.inputs[0] else None
        if shrink is None or shrink.op_type != "MatMul":  # a `Gemm` with B can feed the next A
            return False
        return self._reads_factor(shrink)

    def _reads_factor(self, node: ir.Node) -> bool:
        factor = node.inputs[1] if len(node.inputs) > 1 else None
        return factor is not None and factor.name in self.bindings

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
        manifest, sites=(), inputs=inputs, profiles={}, files=files, flavour="none", max_loras=0
    )
    (directory / MANIFEST_FILE).write_text(plain.to_json(), encoding="utf-8")
    return directory


def _bypass(operator: Operator, node: ir.Node, site: int) -> None:
    """Make readers of a site's output read what the delta was added to."""
    if operator.has_addend:
        _read_instead(node.outputs[site], node.inputs[operator.addend(site)])
        return
    _bypass_addition(node.outputs[site])


def _bypass_product(node: ir.Node) -> None:
    """As `_bypass`, for a product with B that an inlined function has left; remove it and A's."""
    if node.op_type == "Gemm":
        _read_instead(node.outputs[0], node.inputs[2])
    else:
        _bypass_addition(node.outputs[0])
    _drop(node.outputs[0])


def _bypass_addition(delta: ir.Value) -> None:
    ((add, index),) = delta.uses()
    _read_instead(add.outputs[0], add.inputs[1 - index])
    graph = add.graph
    assert isinstance(graph, ir.Graph)
    graph.remove(add, safe=True)


def _drop(value: ir.Value) -> None:
    """Remove the nodes that compute a value which nothing reads."""
    node = value.producer()
    if node is None or value.uses() or not isinstance(node.graph, ir.Graph):
        return
    operands = [operand for operand in node.inputs if operand is not None]
    node.graph.remove(node, safe=True)
    for operand in operands:
        _drop(operand)


def _read_instead(value: ir.Value, other: ir.Value | None) -> None:
    assert other is not None  # an Add has two operands, a node all its addends
    if value.is_graph_output():  # the caller knows the output by its name
        other.name, value.name = value.name, other.name
    ir.convenience.replace_all_uses_with(value, other, replace_graph_outputs=True)
