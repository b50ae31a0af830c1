"""Choice of an executor: TensorRT on a GPU, with ONNX Runtime on the CPU as fallback."""

import logging
from pathlib import Path

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels.launcher import chip_of
from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.engines.engine import EngineExecutor
from trt_lora.runtime.engines.engine_files import check_files
from trt_lora.runtime.engines.interface import check_manifest
from trt_lora.runtime.engines.onnxruntime.engine import OnnxRuntimeEngine
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.manifest import PLAN_FILE, Manifest, read_manifest
from trt_lora.runtime.memory.cuda import call, cuda_obstacle

_LOG = logging.getLogger(__name__)

BACKENDS = ("auto", "tensorrt", "onnxruntime")


@checked
def open_executor(
    directory: str | Path, backend: str = "auto", *, check: str = "fast"
) -> EngineExecutor:
    """Return the executor of an engine directory, to be used as a context manager.

    Args:
        directory: what `build-engine --output` made.
        backend: "tensorrt", "onnxruntime", or "auto": TensorRT where a plan and a GPU that its
            library supports are there; which of them it is, and why, is logged.
        check: "fast" compares the files with the manifest by size and a sample, in milliseconds;
            "full" by every byte, which takes a second per gigabyte (`check_files`).

    Raises:
        ManifestError: the directory is no engine, is incomplete, or has a damaged file.
        ConfigError: there is no such check.
        BackendError: the backend does not exist or cannot run here; the message says why.
    """
    directory = Path(directory)
    if backend not in BACKENDS:
        raise BackendError(f"unknown backend {backend!r}; choose from: {', '.join(BACKENDS)}")
    manifest = read_manifest(directory)
    is_asked = backend != "onnxruntime"
    obstacle = _tensorrt_obstacle(directory, manifest) if is_asked else "not asked for"
    if backend == "tensorrt" and obstacle:
        raise BackendError(f"{directory} cannot run on TensorRT here: {obstacle}")
    if backend == "auto":
        refused = "" if obstacle else _gpu_obstacle(manifest)  # `tensorrt` tries all the same
        obstacle = obstacle or refused
        gpu = f"{manifest.flavour} (GPU): it has a plan, and library and GPU are there"
        choice = f"ONNX Runtime (CPU): {obstacle}" if obstacle else gpu
        _LOG.log(logging.WARNING if refused else logging.INFO, "%s runs on %s", directory, choice)
    check_files(directory, manifest, check, "onnxruntime" if obstacle else "tensorrt")
    check_manifest(directory, manifest)
    if obstacle:
        return OnnxRuntimeEngine(directory, manifest)
    return TensorRTEngine(directory, manifest)


def _tensorrt_obstacle(directory: Path, manifest: Manifest) -> str:
    """Reason why TensorRT cannot run this engine here; empty if it can."""
    if manifest.flavour == "none":
        return "it was built with --flavour none and has no plan; build it again with another"
    if not (directory / PLAN_FILE).exists():
        return f"it has no {PLAN_FILE}; copy it beside the other files"
    flavour = flavour_named(manifest.flavour)
    if not flavour.installed:
        return (
            f"its plan is for {flavour.name}, which is not installed; "
            f"pip install 'trt-lora[{flavour.extra}]'"
        )
    return cuda_obstacle()


def _gpu_obstacle(manifest: Manifest) -> str:
    """Reason why this GPU runs no plan of the engine's flavour; empty if it may."""
    chip = chip_of(call("cudaGetDevice"))
    return flavour_named(manifest.flavour).gpu_obstacle(chip.version)
