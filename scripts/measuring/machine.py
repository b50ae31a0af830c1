"""The machine of a benchmark: processor, GPU, versions of what runs on them, and the checkout."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from trt_lora.plugins.extras import installed_versions
from trt_lora.runtime.memory.cuda import call
from trt_lora.runtime.memory.tensor import HOST

_PACKAGES = (
    *("trt-lora", "numpy", "onnxruntime", "tensorrt-rtx-cu13", "tensorrt", "cuda-bindings"),
    *("nvidia-cuda-nvrtc", "torch", "transformers", "peft"),
)
_CPUINFO = Path("/proc/cpuinfo")


def machine_of(device: str) -> dict[str, str]:
    """Return this machine, the GPU that `device` is, as `Tensor.device` names it, and versions."""
    host = {"cpu": _cpu(), "cores": str(os.cpu_count()), "python": platform.python_version()}
    return host | _gpu(device) | installed_versions(_PACKAGES)


def checkout(root: Path) -> dict[str, str]:
    """Return the commit of a checkout, and its changed files."""
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    return {
        "commit": commit,
        "changed files": _output("git", "-C", str(root), "status", "--porcelain"),
    }


def device_name(properties: Any) -> str:
    """Return the name in the `cudaDeviceProp` of a GPU."""
    name = properties.name
    return name.decode() if isinstance(name, bytes) else str(name)


def _cpu() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu(device: str) -> dict[str, str]:
    if device == HOST:
        return {}
    properties = call("cudaGetDeviceProperties", int(device.partition(":")[2] or 0))
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": device_name(properties),
        "compute capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
    }


def _output(*command: str) -> str:
    """Return a command's output, or why it could not be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()[:200]}"
