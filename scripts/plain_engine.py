"""Take LoRA out of an engine again: the same export without it, to compare with."""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.build import WEIGHTS_FILE
from trt_lora.plugins.contract import DOMAIN
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, read_manifest


def engine_without_lora(engine: Path, directory: Path) -> Path:
    """Write the ONNX file of `engine` without LoRA nodes and inputs to the folder `directory`.

    The weights are copied: ONNX Runtime refuses a link that leads out of the folder. The result has
    no sites and no plan.
    """
    manifest = read_manifest(engine)
    model = ir.load(engine / ONNX_FILE)
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        y = node.inputs[0]
        assert y is not None  # the linear's own output
        ir.convenience.replace_all_uses_with(node.outputs[0], y)
        model.graph.remove(node, safe=True)
    for value in [value for value in model.graph.inputs if value.name in manifest.lora_bindings]:
        model.graph.inputs.remove(value)
    model.functions.clear()
    ir.save(model, directory / ONNX_FILE)
    shutil.copyfile(engine / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    inputs = tuple(b for b in manifest.inputs if b.name not in manifest.lora_bindings)
    plain = replace(manifest, sites=(), inputs=inputs, profiles={}, files={}, flavour="none")
    (directory / MANIFEST_FILE).write_text(plain.to_json(), encoding="utf-8")
    return directory
