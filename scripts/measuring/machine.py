"""The machine of a benchmark: processor, GPU, and versions of what runs on them."""

import os
import platform
from typing import Any

from trt_lora.plugins.extras import installed_versions
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


def device_name(properties: Any) -> str:
    """Return the name in the `cudaDeviceProp` of a GPU."""
    name = properties.name
    return name.decode() if isinstance(name, bytes) else str(name)


def _gpu(device: str) -> dict[str, str]:
    if device == HOST:
        return {}
    properties = call("cudaGetDeviceProperties", int(device.partition(":")[2] or 0))
    return {"gpu": device_name(properties)}
