"""Take LoRA out of an engine again: the same export without it, to compare with."""

import shutil
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.plugins.operator import DOMAIN, Operator, operator_named
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE, read_manifest


def engine_without_lora(engine: Path, directory: Path) -> Path:
    """Write the ONNX file of `engine` without LoRA nodes and inputs to the folder `directory`.

    The weights are copied: ONNX Runtime refuses a link that leads out of the folder. The result has
    no sites and no plan.
    """
    manifest = read_manifest(engine)
    model = ir.load(engine / ONNX_FILE)
    remove_lora(model, manifest.lora_bindings)
    ir.save(model, directory / ONNX_FILE)
    shutil.copyfile(engine / ONNX_WEIGHTS_FILE, directory / ONNX_WEIGHTS_FILE)
    inputs = tuple(b for b in manifest.inputs if b.name not in manifest.lora_bindings)
    plain = replace(manifest, sites=(), inputs=inputs, profiles={}, files={}, flavour="none")
    (directory / MANIFEST_FILE).write_text(plain.to_json(), encoding="utf-8")
    return directory


def remove_lora(model: ir.Model, bindings: Container[str | None]) -> None:
    """Take the LoRA nodes and the inputs called `bindings` out of a model, in place."""
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        operator = operator_named(node.op_type)
        assert operator is not None  # the pass inserts no other
        for site in range(operator.sites):
            _bypass(operator, node, site)
        model.graph.remove(node, safe=True)
    for value in [value for value in model.graph.inputs if value.name in bindings]:
        model.graph.inputs.remove(value)
    model.functions.clear()


def _bypass(operator: Operator, node: ir.Node, site: int) -> None:
    """Make readers of a site's output read what the delta was added to."""
    if operator.adds:
        _read_instead(node.outputs[site], node.inputs[operator.addend(site)])
        return
    ((add, index),) = node.outputs[site].uses()
    _read_instead(add.outputs[0], add.inputs[1 - index])
    graph = add.graph
    assert isinstance(graph, ir.Graph)
    graph.remove(add, safe=True)


def _read_instead(value: ir.Value, other: ir.Value | None) -> None:
    assert other is not None  # an Add has two operands, a node all its addends
    if value.is_graph_output():  # the caller knows the output by its name
        other.name, value.name = value.name, other.name
    ir.convenience.replace_all_uses_with(value, other, replace_graph_outputs=True)
