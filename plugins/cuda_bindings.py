"""Lazy import of cuda-python, and checked calls into CUDA driver, CUDA runtime and NVRTC."""

import importlib
from collections.abc import Callable
from typing import Any

from trt_lora.plugins.errors import BackendError

_INSTALL = "pip install 'trt-lora[rtx]' or 'trt-lora[tensorrt]'"
_EXPLAIN = {
    "driver": "cuGetErrorString",
    "nvrtc": "nvrtcGetErrorString",
    "runtime": "cudaGetErrorString",
}
_NEXT_STEPS = {  # by status, where NVIDIA's explanation names none
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "; the driver is older than NVRTC: update the driver, or "
    "install an older nvidia-cuda-nvrtc (`trt-lora doctor` shows both versions)",
}


def checked(name: str, function: str, *args: Any) -> Any:
    """Call a function of `driver`, `runtime` or `nvrtc`.

    Returns:
        Its one result, or a tuple of several or none.

    Raises:
        BackendError: the library is missing, or the call failed; with NVIDIA's own explanation.
    """
    return checked_function(name, function)(*args)


def checked_function(name: str, function: str) -> Callable[..., Any]:
    """Return `checked` for one function, which is looked up once instead of at every call.

    Raises:
        BackendError: cuda-python is not installed.
    """
    library = bindings(name)
    unchecked = getattr(library, function)

    def call(*args: Any) -> Any:
        try:
            status, *results = unchecked(*args)
        except RuntimeError as error:  # so says cuda-python when a library or the driver is missing
            hint = f"; {_INSTALL}" if name == "nvrtc" else ""
            raise BackendError(f"{function}: {error}{hint}") from error
        if int(status):
            _, text = getattr(library, _EXPLAIN[name])(status)
            step = _NEXT_STEPS.get(status.name, "")
            raise BackendError(f"{function}: {text.decode()} ({status.name}){step}")
        return results[0] if len(results) == 1 else tuple(results)

    return call


def bindings(name: str) -> Any:
    """Return a module of cuda-python.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise BackendError(f"cuda-python cannot be imported ({error}); {_INSTALL}") from error
