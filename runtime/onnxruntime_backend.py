"""Run an engine's ONNX graph on the CPU with ONNX Runtime: the same inputs, outputs and numbers."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime.executor import check_inputs
from trt_lora.runtime.manifest import ONNX_FILE, Binding, Manifest
from trt_lora.runtime.memory import HostMemory
from trt_lora.runtime.tensors import HOST, Tensor, TensorMap


class OnnxRuntimeEngine:
    """An `Engine` on the CPU; it reads and returns host memory in place."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        if manifest.dtype == "bfloat16":
            raise BackendError(
                f"{directory} is a bfloat16 engine, which ONNX Runtime cannot run on the CPU; "
                "build it with --dtype float32 or float16, or run it with TensorRT on a GPU"
            )
        self.directory = directory
        self.manifest = manifest
        self.memory = HostMemory()
        self.rank_multiple = 1  # it runs no plugin
        self.input_names = tuple(binding.name for binding in manifest.inputs)
        self.output_names = tuple(binding.name for binding in manifest.outputs)
        self._dtypes = {binding.name: binding.dtype for binding in manifest.inputs}
        self._session: Any = None
        # What a run binds stays bound, and most of it is the same in the next: 420 LoRA inputs
        # handed over anew cost a token a tenth of its time.
        self._binding: Any = None
        self._bound: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        """Load the graph.

        Raises:
            BackendError: ONNX Runtime is not installed or refuses the graph.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendError(
                f"onnxruntime cannot be imported ({error}); pip install 'trt-lora[cpu]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; the warnings are about its own optimisations
        try:
            self._session = onnxruntime.InferenceSession(
                self.directory / ONNX_FILE, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exceptions have no common base of their own
            raise BackendError(f"ONNX Runtime cannot load {self.directory}: {error}") from error
        self._check_interface()
        self._binding = self._session.io_binding()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the graph and the last inputs."""
        self._binding = self._session = None
        self._bound.clear()

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the graph once; see `Executor.execute`."""
        if self._session is None:
            raise StateError("the engine is closed; use: with open_engine(directory) as engine")
        check_inputs(tensor_map, self.input_names)
        for name in self.input_names:
            self._bind(name, tensor_map[name])
        self._binding.clear_binding_outputs()
        for name in self.output_names:
            self._binding.bind_output(name)  # allocated by the run, at the size it needs
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its exceptions have no common base of their own
            raise TensorError(f"ONNX Runtime refuses these inputs: {error}") from error
        return {
            binding.name: _tensor(binding, value)
            for binding, value in zip(
                self.manifest.outputs, self._binding.get_outputs(), strict=True
            )
        }

    def _bind(self, name: str, tensor: Tensor) -> None:
        if self._bound.get(name) is not tensor:
            self._binding.bind_ortvalue_input(name, self._make_value(name, tensor))
            self._bound[name] = tensor  # keeps its memory alive as long as it is bound

    def _make_value(self, name: str, tensor: Tensor) -> Any:
        """The OrtValue over a tensor's memory; an output of an earlier run is one already."""
        import onnxruntime

        if tensor.dtype != self._dtypes[name] or tensor.device != HOST:
            raise TensorError(
                f"{name} is {tensor.dtype} on {tensor.device}; "
                f"this engine takes {self._dtypes[name]} on {HOST}"
            )
        owner: Any = tensor.owner
        if isinstance(owner, onnxruntime.OrtValue) and tuple(owner.shape()) == tensor.shape:
            return owner
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.storage())

    def _check_interface(self) -> None:
        """The manifest must speak of this very graph."""
        found = [value.name for value in self._session.get_inputs()]
        if found != list(self.input_names):
            raise BackendError(
                f"{self.directory / ONNX_FILE} has other inputs than its manifest; build it again"
            )


def _tensor(binding: Binding, value: Any) -> Tensor:
    shape = tuple(int(size) for size in value.shape())
    return Tensor(value.data_ptr(), shape, binding.dtype, HOST, owner=value)
