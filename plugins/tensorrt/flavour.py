"""TensorRT and TensorRT-RTX behind one object: module name, extra and features of each."""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.soname_alias import alias_obstacle, load_alias


@dataclass(frozen=True)
class Flavour:
    """One of the two libraries that build and run engines."""

    name: str  # what the command line and the manifest call it
    module: str  # what Python imports
    extra: str  # the extra of this package that installs it
    has_timing_cache: bool  # in TensorRT-RTX the calls exist and do nothing
    has_aot_plugins: bool = False  # quickly deployable ones, compiled into the plan
    has_runtime_cache: bool = False  # of what it compiles on the GPU, when an engine first runs
    graph_flag: str = ""  # of the builder, without which an engine cannot become a CUDA graph
    missing_name: str = ""  # of its library, which the ONNX parser asks for and the wheel lacks
    library: str = ""  # the name that the wheel's library has

    @property
    def installed(self) -> bool:
        """True if the library can be imported; it is not imported to find out."""
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> Any:
        """Import the library and return its module, ready to parse plugins where it can.

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
        if self.missing_name and not self.plugin_obstacle():
            load_alias(self.missing_name, self.library)
        return module

    def compute_capabilities(self) -> dict[str, Any]:
        """Return what a plan can be compiled for away from its GPU, by names such as "8.9".

        Raises:
            BackendError: the library is not installed, or it fails to load.
        """
        kinds = getattr(self.load(), "ComputeCapability", None)
        members = {} if kinds is None else kinds.__members__
        versions = {name: name.removeprefix("SM") for name in members if name.startswith("SM")}
        return {f"{sm[:-1]}.{sm[-1]}": members[name] for name, sm in versions.items()}

    def gpu_obstacle(self, version: str) -> str:
        """Reason why GPUs of a compute capability, such as 9.0, run no plan; empty if they may.

        Raises:
            BackendError: the library is not installed, or it fails to load.
        """
        supported = self.compute_capabilities()
        if not supported or version in supported:  # full TensorRT has no such list
            return ""
        return (
            f"{self.name} supports GPUs of compute capability {', '.join(supported)}, and this one "
            f"has {version}; a GPU of a data centre needs full TensorRT: pip install "
            "'trt-lora[tensorrt]', and build the engine again with --flavour tensorrt"
        )

    def plugin_obstacle(self) -> str:
        """Reason why the LoRA plugin cannot be used here; empty if it can."""
        return alias_obstacle() if self.missing_name else ""


TENSORRT = Flavour(
    "tensorrt", "tensorrt", extra="tensorrt", has_timing_cache=True, has_aot_plugins=True
)
TENSORRT_RTX = Flavour(
    "tensorrt-rtx",
    "tensorrt_rtx",
    extra="rtx",
    has_timing_cache=False,
    has_runtime_cache=True,
    graph_flag="REQUIRE_USER_ALLOCATION",
    missing_name="libtensorrt_rtx.so",
    library="libtensorrt_rtx.so.1",
)
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
