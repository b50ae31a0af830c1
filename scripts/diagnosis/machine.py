"""The machine: NVIDIA's driver, GPUs with their free memory, TensorRT flavours, versions."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.extras import installed_versions
from trt_lora.plugins.tensorrt.flavour import FLAVOURS, Flavour
from trt_lora.runtime.memory.cuda import call, cuda_obstacle, on_device, try_call

DRIVER_FILE = Path("/proc/driver/nvidia/version")  # of the kernel module, also in a container
PACKAGES = (
    *("trt-lora", "numpy", "safetensors", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13"),
    *("cuda-python", "nvidia-cuda-nvrtc", "tokenizers", "torch", "transformers"),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU of this process, in the order of `CUDA_VISIBLE_DEVICES`."""

    index: int
    name: str = ""
    compute_capability: str = ""  # such as 9.0
    total_bytes: int = 0
    free_bytes: int = 0
    obstacle: str = ""  # why it cannot be used; then the rest is empty


@dataclass(frozen=True)
class FlavourState:
    """Whether TensorRT, or TensorRT-RTX, can be used here."""

    name: str
    obstacle: str  # why it cannot; empty if it can
    plugin_obstacle: str  # why the LoRA plugin cannot be used in it


@dataclass(frozen=True)
class Machine:
    """What can run an engine here."""

    python: str
    platform: str
    cpus: int
    free_bytes: int | None  # of the host's memory; None where the system does not say
    driver: str  # version of NVIDIA's driver; empty where there is none
    driver_cuda: str  # the newest CUDA that it knows
    cuda_obstacle: str  # why no GPU can be used; empty if one can
    gpus: tuple[Gpu, ...]
    flavours: tuple[FlavourState, ...]
    onnxruntime_obstacle: str  # why ONNX Runtime cannot run engines on the CPU; empty if it can
    versions: Mapping[str, str]  # of packages that are installed


def describe_machine() -> Machine:
    """Ask driver, GPUs and libraries; a part that is missing is an obstacle, and no error."""
    obstacle = cuda_obstacle()
    return Machine(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpus=os.cpu_count() or 1,
        free_bytes=_free_host_bytes(),
        driver=driver_version(DRIVER_FILE),
        driver_cuda=cuda_version(int(try_call("cudaDriverGetVersion") or 0)),
        cuda_obstacle=obstacle,
        gpus=() if obstacle else tuple(map(_gpu, range(call("cudaGetDeviceCount")))),
        flavours=tuple(map(_flavour, FLAVOURS)),
        onnxruntime_obstacle="" if find_spec("onnxruntime") else _not_installed("cpu"),
        versions=installed_versions(PACKAGES),
    )


def driver_version(file: Path) -> str:
    """Return the version in a file that the driver writes; empty without one."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text(errors="replace"))
    except OSError:
        return ""
    return found[0] if found else ""


def cuda_version(number: int) -> str:
    """Return a version as people write it: 13.0 for 13000; empty for 0, which is none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def device_name(properties: Any) -> str:
    """Return the name in the `cudaDeviceProp` of a GPU."""
    name = properties.name
    return name.decode() if isinstance(name, bytes) else str(name)


def _gpu(index: int) -> Gpu:
    try:
        properties = call("cudaGetDeviceProperties", index)
        with on_device(index):
            free, total = call("cudaMemGetInfo")
    except BackendError as error:
        return Gpu(index, obstacle=str(error))
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(index, device_name(properties), capability, int(total), int(free))


def _flavour(flavour: Flavour) -> FlavourState:
    """Load it, which finds a library that is installed and damaged."""
    obstacle = _not_installed(flavour.extra)
    if flavour.installed:
        try:
            flavour.load()
            obstacle = ""
        except BackendError as error:
            obstacle = str(error)
    return FlavourState(flavour.name, obstacle, flavour.plugin_obstacle())


def _not_installed(extra: str) -> str:
    return f"not installed; pip install 'trt-lora[{extra}]'"


def _free_host_bytes() -> int | None:
    """What the kernel could give without swapping, on Linux."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
