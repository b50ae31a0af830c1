"""Run an engine's plan on a GPU with TensorRT or TensorRT-RTX."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.plugins.flavour import flavour_named
from trt_lora.runtime.cuda import CudaMemory, call, release
from trt_lora.runtime.executor import check_inputs
from trt_lora.runtime.manifest import PLAN_FILE, Manifest, Range
from trt_lora.runtime.tensors import Tensor, TensorMap


class TensorRTEngine:
    """An `Engine` on a GPU. LoRA weights and cache stay on the device; tokens are uploaded."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.memory = CudaMemory()
        self.input_names = tuple(binding.name for binding in manifest.inputs)
        self.output_names = tuple(binding.name for binding in manifest.outputs)
        self._flavour = flavour_named(manifest.flavour)
        self._dtypes = {binding.name: binding.dtype for binding in manifest.inputs}
        self._context: Any = None
        self._runtime: Any = None  # must outlive the context
        self._stream = 0
        self._profile = 0
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}  # address and shape by input

    def __enter__(self) -> Self:
        """Load the plan onto the current GPU.

        Raises:
            BackendError: the library cannot be imported, or refuses the plan on this GPU.
        """
        trt = self._flavour.load()
        runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        engine = runtime.deserialize_cuda_engine((self.directory / PLAN_FILE).read_bytes())
        if engine is None:
            raise BackendError(
                f"{self._flavour.name} refuses {self.directory / PLAN_FILE} on this GPU "
                f"(built with {dict(self.manifest.versions)}); build it on this machine"
            )
        context = engine.create_execution_context()
        if context is None:
            raise BackendError("no execution context: the GPU is out of memory for this engine")
        self.memory = CudaMemory(int(call("cudaGetDevice")))
        self._stream = int(call("cudaStreamCreate"))  # last: what fails before leaves none behind
        self._context, self._runtime = context, runtime
        self._profile = 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release context, plan and stream; tensors stay until their owners let go."""
        release("cudaStreamSynchronize", self._stream)  # a run that failed may have left work
        self._context = self._runtime = None
        self._bound.clear()
        release("cudaStreamDestroy", self._stream)

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the plan once and wait for it; see `Executor.execute`."""
        if self._context is None:
            raise StateError("the engine is closed; use: with open_engine(directory) as engine")
        check_inputs(tensor_map, self.input_names)
        inputs = self._on_device(tensor_map)
        self._use_profile(inputs)
        for name, tensor in inputs.items():
            self._bind(name, tensor)
        outputs = self.memory.empty(
            [
                (binding.name, binding.dtype, self._output_shape(binding.name))
                for binding in self.manifest.outputs
            ]
        )
        for name, tensor in outputs.items():
            self._set_address(name, tensor)
        try:
            started = self._context.execute_async_v3(self._stream)
        finally:  # an interrupted run too must end before its memory is let go of
            call("cudaStreamSynchronize", self._stream)
        if not started:
            raise BackendError("the engine failed to run; its own log says why")
        return outputs

    def _on_device(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        inputs = {name: tensor_map[name] for name in self.input_names}
        for name, tensor in inputs.items():
            if tensor.dtype != self._dtypes[name]:
                raise TensorError(
                    f"{name} is {tensor.dtype}; this engine takes {self._dtypes[name]}"
                )
        return self.memory.upload(inputs, self._stream)

    def _use_profile(self, inputs: Mapping[str, Tensor]) -> None:
        index = select_profile(self.manifest, {name: t.shape for name, t in inputs.items()})
        if index == self._profile:
            return
        self._bound.clear()  # a switch forgets shapes and addresses
        if not self._context.set_optimization_profile_async(index, self._stream):
            raise BackendError(f"TensorRT refuses optimization profile {index} of this engine")
        self._profile = index

    def _bind(self, name: str, tensor: Tensor) -> None:
        """Set shape and address unless they are set; most inputs are bound again and again."""
        place = (tensor.pointer, tensor.shape)
        if self._bound.get(name) == place:
            return
        self._bound.pop(name, None)  # unknown until both are set
        if not self._context.set_input_shape(name, tensor.shape):
            raise TensorError(f"TensorRT refuses shape {list(tensor.shape)} for {name}")
        self._set_address(name, tensor)
        self._bound[name] = place

    def _set_address(self, name: str, tensor: Tensor) -> None:
        if not self._context.set_tensor_address(name, tensor.pointer):
            raise TensorError(f"TensorRT refuses address {tensor.pointer:#x} for {name}")

    def _output_shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise BackendError(
                f"the shape of {name} is unknown after all inputs of the manifest are set: "
                f"{list(shape)}; the plan is of another engine, build it again"
            )
        return shape


def select_profile(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the index of the first profile that allows all shapes.

    Raises:
        TensorError: none does; with the first input that the last profile refuses, and its range.
    """
    refused = ""
    for index, ranges in enumerate(manifest.profiles.values()):
        refused = next((name for name, r in ranges.items() if not _allows(r, shapes[name])), "")
        if not refused:
            return index
    allowed = "; ".join(
        f"{profile}: {list(ranges[refused].min)} to {list(ranges[refused].max)}"
        for profile, ranges in manifest.profiles.items()
    )
    raise TensorError(f"{refused} has shape {list(shapes[refused])}; this engine allows {allowed}")


def _allows(allowed: Range, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(allowed.min) and all(
        low <= size <= high for low, size, high in zip(allowed.min, shape, allowed.max, strict=True)
    )
