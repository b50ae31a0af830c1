"""The machine of a benchmark: processor, GPU, and versions of what runs on them."""

import os
import platform

from trt_lora.builder.versions import installed_versions
from trt_lora.runtime.memory.cuda import call
from trt_lora.runtime.memory.tensor import HOST

_PACKAGES = ("trt-lora", "numpy", "onnxruntime", "tensorrt-rtx-cu13", "tensorrt")


def host_machine() -> dict[str, str]:
    """Return processor, cores and Python of this machine."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def machine_of(device: str) -> dict[str, str]:
    """Return this machine, the GPU that `device` is, as `Tensor.device` names it, and versions."""
    return host_machine() | _gpu(device) | installed_versions(_PACKAGES)


def _gpu(device: str) -> dict[str, str]:
    if device == HOST:
        return {}
    name = call("cudaGetDeviceProperties", int(device.partition(":")[2] or 0)).name
    return {"gpu": name.decode() if isinstance(name, bytes) else str(name)}
