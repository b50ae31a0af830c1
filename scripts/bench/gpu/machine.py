"""The machine and checkout of a benchmark run: device, driver, versions, commit."""

import platform
import subprocess
from pathlib import Path
from typing import Any

from trt_lora.plugins.extras import installed_versions
from trt_lora.runtime.memory.cuda import call
from trt_lora.scripts.diagnosis.machine import cuda_version, device_name

ROOT = Path(__file__).resolve().parents[3]  # of the checkout

PACKAGES = (
    "trt-lora", "torch", "triton", "peft", "transformers", "numpy", "cuda-bindings", "cuda-python",
    "nvidia-cuda-nvrtc", "tensorrt", "tensorrt-rtx-cu13", "vllm",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Return the description of the current GPU and of what runs on it.

    Raises:
        BackendError: there is no GPU.
    """
    device = int(call("cudaGetDevice"))
    properties = call("cudaGetDeviceProperties", device)
    return {
        "device": device_name(properties),
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": int(properties.multiProcessorCount),
        "memory, bytes": int(properties.totalGlobalMem),
        "level-2 cache, bytes": int(properties.l2CacheSize),
        "driver": _driver_version(),
        "CUDA of the driver": cuda_version(int(call("cudaDriverGetVersion"))),
        "CUDA runtime": cuda_version(int(call("cudaRuntimeGetVersion"))),
        "python": platform.python_version(),
        "versions": package_versions(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changed files": _output("git", "-C", str(ROOT), "status", "--porcelain"),
    }


def architecture(compute_capability: tuple[int, int]) -> str:
    """Return what NVRTC compiles for; PTX of an older architecture runs on every newer one."""
    return "compute_90" if compute_capability >= (9, 0) else "compute_80"


def package_versions() -> dict[str, str]:
    """Return the version of every one of `PACKAGES`, or that it is not installed."""
    return dict.fromkeys(PACKAGES, "not installed") | installed_versions(PACKAGES)


def slug(device: str) -> str:
    """Return a device's name as part of a file name: `nvidia-h200`."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def _driver_version() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output(*command: str) -> str:
    """Return a command's output, or why it could not be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()[:200]}"
