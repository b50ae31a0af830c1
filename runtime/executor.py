"""What runs an engine, and the choice between TensorRT on a GPU and ONNX Runtime on the CPU."""

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.plugins.flavour import flavour_named
from trt_lora.runtime.cuda import cuda_obstacle
from trt_lora.runtime.engine_files import check_files
from trt_lora.runtime.manifest import PLAN_FILE, Manifest, read_manifest
from trt_lora.runtime.memory import Memory
from trt_lora.runtime.tensors import Tensor, TensorMap

_LOG = logging.getLogger(__name__)

BACKENDS = ("auto", "tensorrt", "onnxruntime")


class Executor(Protocol):
    """An engine that can be run inside `with`; nothing touches a GPU before."""

    @property
    def manifest(self) -> Manifest:
        """What the engine takes."""
        ...

    @property
    def memory(self) -> Memory:
        """Where its tensors live."""
        ...

    @property
    def rank_multiple(self) -> int:
        """What ranks are padded to, with zeros, when an adapter is loaded; 1 pads nothing."""
        ...

    def release_inputs(self) -> None:
        """Let go of the inputs of earlier runs; the next run binds its own anew."""
        ...

    @property
    def input_names(self) -> Sequence[str]:
        """Names of all inputs, in the engine's order."""
        ...

    @property
    def output_names(self) -> Sequence[str]:
        """Names of all outputs, in the engine's order."""
        ...

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the engine once and return every output, in memory that the result owns.

        Any number of threads may call it; each has the outputs of its own inputs, which nobody
        may write to before it returns.

        Raises:
            TensorError: an input is missing, or has a shape, dtype or device the engine refuses.
            StateError: called outside `with`.
        """
        ...


class Engine(Executor, Protocol):
    """An executor as `open_engine` returns it: a context manager over an engine directory.

    It is open once at a time, and may be entered again after it was left.
    """

    @property
    def directory(self) -> Path:
        """The engine directory."""
        ...

    def __enter__(self) -> Self:
        """Load the engine.

        Raises:
            BackendError: it cannot be loaded.
            StateError: it is open already.
        """
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Refuse further runs, wait for those under way in other threads, release everything."""
        ...


def open_engine(directory: str | Path, backend: str = "auto", *, check: str = "fast") -> Engine:
    """Return the executor of an engine directory, to be used as a context manager.

    Args:
        directory: what `build-engine --output` made.
        backend: "tensorrt", "onnxruntime", or "auto": TensorRT where a GPU and a plan are there;
            which of them it is, and why, is logged.
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
    obstacle = (
        _tensorrt_obstacle(directory, manifest) if backend != "onnxruntime" else "not asked for"
    )
    if backend == "tensorrt" and obstacle:
        raise BackendError(f"{directory} cannot run on TensorRT here: {obstacle}")
    if backend == "auto":
        _LOG.info("%s runs on %s", directory, _choice(manifest, obstacle))
    check_files(directory, manifest, check, "onnxruntime" if obstacle else "tensorrt")
    if obstacle:
        from trt_lora.runtime.onnxruntime_backend import OnnxRuntimeEngine

        return OnnxRuntimeEngine(directory, manifest)
    from trt_lora.runtime.tensorrt_backend import TensorRTEngine

    return TensorRTEngine(directory, manifest)


def _choice(manifest: Manifest, obstacle: str) -> str:
    """The backend in words, and why not the other."""
    if obstacle:
        return f"ONNX Runtime (CPU): {obstacle}"
    return f"{manifest.flavour} (GPU): it has a plan, and library and GPU are there"


def _tensorrt_obstacle(directory: Path, manifest: Manifest) -> str:
    """Why TensorRT cannot run this engine here; empty if it can."""
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


def check_inputs(tensor_map: TensorMap, input_names: Sequence[str]) -> None:
    """Raise TensorError if the map lacks an input."""
    missing = [name for name in input_names if name not in tensor_map]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TensorError(
            f"the tensor map lacks {', '.join(missing[:3])}{more}; "
            "LoRA bindings are written by LoRAManager.refresh_tensor_map"
        )


def closed() -> StateError:
    """Return the error of a run outside `with`."""
    return StateError("the engine is closed; use: with open_engine(directory) as engine")


def open_already() -> StateError:
    """Return the error of an engine that is entered twice."""
    return StateError("the engine is open already; make another one of the same directory")
