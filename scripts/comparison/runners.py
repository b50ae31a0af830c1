"""Runners of a comparison with their versions and devices, from polygraphy's runner names."""

import importlib.metadata

from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.comparison.files import Accuracy, check_complete
from trt_lora.scripts.comparison.references import Reference
from trt_lora.scripts.comparison.report import ComparisonRow, row_of


def compared_row(
    accuracy: Accuracy, reference: Reference, manifest: Manifest, adapter: str
) -> ComparisonRow:
    """Return the row of a comparison, once it is sure that everything was compared.

    Raises:
        BackendError: an output was not.
    """
    check_complete(accuracy, [output.name for output in manifest.outputs])
    engine, other = (runner_text(name, manifest) for name in accuracy.runners)
    against = f"{reference.graph}, {other}" if reference.graph else other
    return row_of(engine, against, adapter, accuracy.errors)


def runner_text(recorded: str, manifest: Manifest) -> str:
    """Return what ran, with its version and device.

    Args:
        recorded: name of a runner in a file of outputs; one that is not polygraphy's says it all.
        manifest: of the engine, which knows the flavour of its plan.
    """
    kind, separator, _ = recorded.partition("-runner-")
    if separator and kind == "onnxrt":  # polygraphy asks for no other provider by itself
        return f"ONNX Runtime {importlib.metadata.version('onnxruntime')} (CPU)"
    if separator and kind in ("trt", "trt-lora"):
        plugin = " with the LoRA plugin" if kind == "trt-lora" else ""
        version = flavour_named(manifest.flavour).load().__version__
        return f"{manifest.flavour} {version}{plugin} (GPU)"
    return recorded
