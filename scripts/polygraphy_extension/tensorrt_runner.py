"""Runner `--trt-lora`: an engine's plan with the LoRA plugin, on this package's runtime.

The runtime of this package runs it, in either flavour: profiles are chosen by shape, and
TensorRT-RTX needs no environment variable here.
"""

import contextlib
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.datatype import DataType

from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.flavour import Flavour, flavour_named, installed_flavour
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, PLAN_FILE, Manifest, read_manifest
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_storage
from trt_lora.scripts.polygraphy_extension.data_loader import polygraphy_errors
from trt_lora.scripts.verification.numpy_or_torch import storage_of


class LoraTensorRTRunner(BaseRunner):  # type: ignore[misc] # polygraphy has no types
    """Runs the plan of an engine directory; builds one first if there is none with the plugin."""

    def __init__(self, engine: str, name: str | None = None) -> None:
        """Keep the directory; nothing touches the GPU before `activate`."""
        super().__init__(name=name, prefix="trt-lora-runner")
        self._directory = Path(engine)

    def activate_impl(self) -> None:
        """Build the plan if need be, and load it; see `BaseRunner.activate`."""
        with contextlib.ExitStack() as stack, polygraphy_errors():
            directory = stack.enter_context(engine_with_plugin(self._directory))
            self.engine = stack.enter_context(open_executor(directory, "tensorrt"))
            self.stack = stack.pop_all()

    def get_input_metadata_impl(self) -> Any:
        """Return names, dtypes and shapes of the inputs; see `BaseRunner.get_input_metadata`."""
        inputs = TensorMetadata()
        for binding in self.engine.manifest.inputs:
            shape = [size if isinstance(size, int) else None for size in binding.shape]
            inputs.add(binding.name, dtype=getattr(DataType, binding.dtype.upper()), shape=shape)
        return inputs

    def infer_impl(self, feed_dict: dict[str, Any]) -> OrderedDict[str, Array]:
        """Run the plan once, bfloat16 outputs as float32; see `BaseRunner.infer`."""
        dtypes = {binding.name: binding.dtype for binding in self.engine.manifest.inputs}
        with polygraphy_errors():
            tensors = {name: _tensor(value, dtypes[name]) for name, value in feed_dict.items()}
            tensor_map = TensorMap(self.engine.memory.upload(tensors))
            start = time.perf_counter()
            outputs = self.engine.execute(tensor_map)
            self.inference_time = time.perf_counter() - start
        return OrderedDict((name, tensor.numpy()) for name, tensor in outputs.items())

    def deactivate_impl(self) -> None:
        """Release the engine; see `BaseRunner.deactivate`."""
        self.stack.close()
        del self.engine, self.stack


def _tensor(value: Any, dtype: str) -> Tensor:
    """A tensor in the memory of an array, or of torch's for bfloat16."""
    array = np.ascontiguousarray(storage_of(value))
    return tensor_from_storage(array.view(storage_dtype(dtype)), dtype)


@contextlib.contextmanager
def engine_with_plugin(directory: Path) -> Iterator[Path]:
    """Yield an engine directory whose plan has the LoRA plugin: this one, or a temporary one.

    Raises:
        ManifestError: the directory is no engine.
        BackendError: no TensorRT is installed, or it cannot have the plugin here.
        ModelError: TensorRT cannot build the graph.
    """
    manifest = read_manifest(directory)
    if manifest.flavour != "none" and manifest.lora_plugin != "native":
        yield directory
        return
    flavour = _flavour(manifest)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        compiler = Compiler(flavour, NoProgress(), lora_plugin="plugin")
        compiler.compile(directory / ONNX_FILE, work / PLAN_FILE, manifest.profiles)
        built = replace(manifest, flavour=flavour.name, lora_plugin="plugin", files={})
        (work / MANIFEST_FILE).write_text(built.to_json(), encoding="utf-8")
        yield work


def _flavour(manifest: Manifest) -> Flavour:
    flavour = installed_flavour() if manifest.flavour == "none" else flavour_named(manifest.flavour)
    if flavour is None:
        raise BackendError(
            "--trt-lora needs TensorRT; pip install 'trt-lora[rtx]' or 'trt-lora[tensorrt]'"
        )
    if obstacle := flavour.plugin_obstacle():
        raise BackendError(f"--trt-lora needs the LoRA plugin: {obstacle}")
    return flavour
