"""CPU engine on ONNX Runtime, with the same inputs and outputs as the TensorRT engine."""

from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.short_repr import short_value
from trt_lora.runtime.engines.engine import closed, open_already
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.interface import Port, check_interface
from trt_lora.runtime.engines.onnxruntime.mapped_weights import MappedWeights
from trt_lora.runtime.engines.onnxruntime.session_pool import OnnxRuntimeTopKRun, SessionPool
from trt_lora.runtime.manifest import ENCODER_FILES, ONNX_CPU_FILE, STEP_FILES, GraphFiles, Manifest
from trt_lora.runtime.memory.dtypes import DTYPES
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

# A pass for convolutions, which ends the process where a float16 graph adds biases:
# https://github.com/microsoft/onnxruntime/issues/28392
_DISABLED_IN_FLOAT16 = ("NchwcTransformer",)
_DTYPES = {"tensor(float)": "float32"} | {f"tensor({dtype})": dtype for dtype in DTYPES}


class OnnxRuntimeEngine:
    """An `Engine` on the CPU; it reads and returns host memory in place.

    Any number of threads may call `execute`: their runs go on at the same time, on the threads
    that ONNX Runtime has for all of them.
    """

    def __init__(self, directory: Path, manifest: Manifest, files: GraphFiles = STEP_FILES) -> None:
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
        own = ONNX_CPU_FILE in manifest.files and files is STEP_FILES
        self._graph = directory / (ONNX_CPU_FILE if own else files.onnx)
        self._weights = directory / files.weights
        self.encoder: OnnxRuntimeEngine | None = None
        if manifest.encoder:
            self.encoder = OnnxRuntimeEngine(directory, manifest.of_encoder, ENCODER_FILES)
        self._open: SessionPool | None = None
        self._entering = Lock()

    def __repr__(self) -> str:
        """Return where it is from, and whether it is open."""
        state = "closed" if self._open is None else "open"
        return f"<{type(self).__name__} {short_value(str(self.directory))}, {state}>"

    def __enter__(self) -> Self:
        """Load the graph.

        Raises:
            BackendError: ONNX Runtime is not installed or refuses the graph.
            StateError: the engine is open already.
        """
        with self._entering:
            if self._open is not None:
                raise open_already()
            weights = MappedWeights(self._weights)
            try:
                if self.encoder is not None:
                    self.encoder.__enter__()
                self._open = SessionPool(self._load(), self.manifest, weights)
            except BaseException:
                weights.close()
                self._close_encoder()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        """Release the graph and the last inputs, after the runs under way in other threads."""
        pool, self._open = self._open, None
        if pool is not None:
            pool.close()
            self._close_encoder()

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the graph once; see `Executor.execute`."""
        return self._pool().run(tensor_map)

    def topk(self, logits: Tensor, temperatures: npt.NDArray[np.float64]) -> HostTopK:
        """Return the best tokens of logits; see `Executor.topk`. They are found when asked for."""
        del temperatures
        return HostTopK.of(logits, self._pool().exp_sums)

    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> OnnxRuntimeTopKRun:
        """Make a run that is replayed; see `Executor.prepare_topk`."""
        del fed  # no run is fed by another
        return self._pool().prepare_topk(tensor_map, logits)

    def warm_up(self) -> None:
        """Do nothing: nothing is compiled."""

    def release_inputs(self) -> None:
        """Let go of the inputs of earlier runs; see `Executor.release_inputs`."""
        if pool := self._open:
            pool.release()

    def _close_encoder(self) -> None:
        if self.encoder is not None:
            self.encoder.__exit__()

    def _pool(self) -> SessionPool:
        if (pool := self._open) is None:
            raise closed()
        return pool

    def _load(self) -> Any:
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendError(
                f"onnxruntime cannot be imported ({error}); pip install 'trt-lora[cpu]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; the warnings are about its own optimisations
        options.enable_mem_pattern = False  # one of 13 kB would be kept for each length of a cache
        try:
            session = onnxruntime.InferenceSession(
                self._graph,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=_DISABLED_IN_FLOAT16 * (self.manifest.dtype == "float16"),
            )
        except Exception as error:  # its exceptions have no common base of their own
            raise BackendError(f"ONNX Runtime cannot load {self.directory}: {error}") from error
        given, optional = session.get_inputs(), session.get_overridable_initializers()
        inputs = [_port(value) for value in (*given, *optional)]
        outputs = [_port(value) for value in session.get_outputs()]
        check_interface(self._graph, self.manifest, inputs, outputs)
        return session


def _port(value: Any) -> Port:
    """An input or output of a session; a default without elements is of any size there."""
    sizes = (size if isinstance(size, int) and size else None for size in value.shape)
    dtype = str(value.type)
    return Port(value.name, _DTYPES.get(dtype, dtype), tuple(sizes))
