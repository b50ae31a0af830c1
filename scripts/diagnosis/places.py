"""Where an engine can run here: every GPU and the CPU, each tried by opening the engine."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.memory.cuda import on_device


@dataclass(frozen=True)
class Place:
    """One backend on one device."""

    backend: str  # "tensorrt" or "onnxruntime"
    device: str  # "cuda:0", or "cuda" where there is no GPU; "cpu"
    obstacle: str  # why the engine cannot run there; empty if it can


def places(directory: Path, gpus: Iterable[int]) -> list[Place]:
    """Open an engine on every GPU and on the CPU, and close it again; nothing is run.

    Args:
        directory: of the engine.
        gpus: their numbers in this process.
    """
    found = [_place(directory, "tensorrt", f"cuda:{gpu}", on_device(gpu)) for gpu in gpus]
    found = found or [_place(directory, "tensorrt", "cuda")]  # says why there is none
    return [*found, _place(directory, "onnxruntime", "cpu")]


def _place(
    directory: Path, backend: str, device: str, there: AbstractContextManager[object] | None = None
) -> Place:
    try:
        with there or nullcontext(), open_executor(directory, backend):
            return Place(backend, device, "")
    except LoRAError as error:
        return Place(backend, device, str(error))
