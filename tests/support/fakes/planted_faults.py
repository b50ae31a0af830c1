"""Engines with one fault planted: a copy that computes something wrong at one site."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes.site_calls import SiteCall, site_calls
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE, read_manifest

_TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def copy_of(engine: Path, directory: Path) -> Path:
    """Copy what ONNX Runtime needs of an engine; its files may be changed."""
    directory.mkdir(parents=True)
    for name in (ONNX_FILE, ONNX_WEIGHTS_FILE, *_TEXT):
        if (engine / name).is_file():
            shutil.copyfile(engine / name, directory / name)
    manifest = replace(read_manifest(engine), files={})
    (directory / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return directory


def cross_wires(engine: Path, path: str, other: str) -> None:
    """Make the node of site `path` read the B of site `other`, in place."""
    model = ir.load(engine / ONNX_FILE)
    (call,) = _calls(model, path)
    wrong = next(value for value in model.graph.inputs if value.name == f"lora_B_{other}")
    node = call.result.producer()
    assert node is not None
    place = [getattr(value, "name", "") for value in node.inputs].index(f"lora_B_{path}")
    node.replace_input_with(place, wrong)
    ir.save(model, engine / ONNX_FILE)


def scale_weight(engine: Path, path: str, factor: float) -> None:
    """Multiply the weight of the linear of site `path`, in place."""
    (call,) = _calls(ir.load(engine / ONNX_FILE), path)
    value = call.linear.inputs[1]
    while value is not None and (node := value.producer()):
        value = node.inputs[0]  # through a Transpose
    assert value is not None
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.offset is not None
    weights = tensor.numpy().copy()
    stored = np.memmap(
        engine / ONNX_WEIGHTS_FILE, weights.dtype, "r+", offset=tensor.offset, shape=weights.shape
    )
    stored[...] = weights * np.asarray(factor, weights.dtype)
    stored.flush()


def _calls(model: ir.Model, path: str) -> list[SiteCall]:
    return [call for call in site_calls(model) if call.path == path]
