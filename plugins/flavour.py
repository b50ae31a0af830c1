"""TensorRT and TensorRT-RTX: one API in two modules, chosen once and passed down as an object."""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trt_lora.plugins.errors import BackendError


@dataclass(frozen=True)
class Flavour:
    """One of the two libraries that build and run engines."""

    name: str  # what the command line and the manifest call it
    module: str  # what Python imports
    extra: str  # the extra of this package that installs it
    has_timing_cache: bool  # in TensorRT-RTX the calls exist and do nothing

    @property
    def installed(self) -> bool:
        """Whether the library can be imported; nothing is imported to find out."""
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> Any:
        """Import the library and return its module.

        Raises:
            BackendError: it is not installed, or it fails to load.
        """
        try:
            module: ModuleType = importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:
            raise BackendError(
                f"{self.name} cannot be imported ({error}); "
                f"install it with: pip install 'trt-lora[{self.extra}]'"
            ) from error
        return module


TENSORRT = Flavour("tensorrt", "tensorrt", extra="tensorrt", has_timing_cache=True)
TENSORRT_RTX = Flavour("tensorrt-rtx", "tensorrt_rtx", extra="rtx", has_timing_cache=False)
FLAVOURS = (TENSORRT, TENSORRT_RTX)


def flavour_named(name: str) -> Flavour:
    """Return the flavour called `name`.

    Raises:
        BackendError: there is none of that name.
    """
    for flavour in FLAVOURS:
        if flavour.name == name:
            return flavour
    names = ", ".join(flavour.name for flavour in FLAVOURS)
    raise BackendError(f"unknown TensorRT flavour {name!r}; choose from: {names}")


def installed_flavour() -> Flavour | None:
    """Return the first flavour that is installed, full TensorRT before TensorRT-RTX."""
    return next((flavour for flavour in FLAVOURS if flavour.installed), None)
