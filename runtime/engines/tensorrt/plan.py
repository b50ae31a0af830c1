"""Deserialized TensorRT plan, with the activation memory and the kernels of all its contexts."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.contract.step import SECOND_STREAM
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels.launcher import chip_of
from trt_lora.plugins.tensorrt.flavour import Flavour
from trt_lora.plugins.tensorrt.plugin_failures import summary
from trt_lora.plugins.tensorrt.plugin_registry import register_plugins
from trt_lora.runtime.engines.interface import Port, check_interface
from trt_lora.runtime.manifest import STEP_FILES, GraphFiles, Manifest
from trt_lora.runtime.memory.cuda import OwnStream, call
from trt_lora.runtime.memory.device import CudaMemory

_LOG = logging.getLogger(__name__)

# NVIDIA's names of the dtypes that an engine's inputs and outputs have.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32"}
_DTYPES |= {"INT64": "int64", "BOOL": "bool"}


class RuntimeCache:
    """Kernels that TensorRT-RTX compiled: read when an engine is opened, written when it is closed.

    It only saves time, so that nothing about it is an error: a file that is damaged, or of another
    GPU, driver or TensorRT-RTX (which checks all that), is ignored and replaced; where no file can
    be written there is none.
    """

    def __init__(self, path: Path, cache: Any) -> None:
        """Fill `cache`, an empty `IRuntimeCache`, from the file."""
        self.cache = cache
        self._path = path
        self._stored = self._load()  # the hash of what the file holds

    def save(self) -> None:
        """Write the file, whole, if it would not stay the same."""
        try:
            data = bytes(self.cache.serialize())
            if data and hash(data) != self._stored:
                with publish_file(self._path) as path:
                    path.write_bytes(data)
        except (OSError, RuntimeError, TypeError) as error:  # None where TensorRT-RTX fails
            _LOG.info("%s is not written: %s", self._path, str(error))

    def _load(self) -> int | None:
        if not self._path.exists():
            return None
        why = "it is damaged, or of another GPU, driver or TensorRT-RTX"
        try:
            data = self._path.read_bytes()
            if data and self.cache.deserialize(data):
                return hash(data)
        except (OSError, RuntimeError) as error:
            why = str(error)
        _LOG.info("%s is ignored, and written anew at the end: %s", self._path, why)
        return None


class Plan:
    """A deserialised plan, its runtime cache, and a buffer and side streams for all its contexts.

    The contexts share these, so that only one may run at a time: use one stream. The buffer has the
    size of the largest profile and never moves. Contexts must go before `close`.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        flavour: Flavour,
        memory: CudaMemory,
        files: GraphFiles = STEP_FILES,
    ) -> None:
        """Load the plan.

        Raises:
            BackendError: the library cannot be imported, or refuses the plan on this GPU; the plan
                has other inputs or outputs than the manifest; the device is out of memory.
        """
        self._trt = trt = flavour.load()
        self._plugins = register_plugins(trt) if manifest.lora_plugin == "plugin" else None
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))  # must outlive the rest
        with self.plugin_calls(), _mapped(directory / files.plan) as plan:
            self._engine = self._runtime.deserialize_cuda_engine(plan)
            if self._engine is None:
                obstacle = flavour.gpu_obstacle(chip_of(memory.index).version)
                raise BackendError(
                    f"{flavour.name} refuses {directory / files.plan} on this GPU (built with "
                    f"{dict(manifest.versions)}); {obstacle or 'build it on this machine'}"
                )
        _check_interface(trt, self._engine, directory / files.plan, manifest)
        if self._plugins is not None:  # now: a first step is a user's, and may be captured
            self._plugins.kernels.load(manifest.dtype, has_slots=bool(manifest.max_loras))
        # TensorRT's own might wait for the default stream, whose use by others would end a capture.
        # Of the highest priority: what runs beside a matrix product then begins before it fills
        # the GPU.
        _, highest = call("cudaDeviceGetStreamPriorityRange")
        self._aux_streams = [OwnStream(highest) for _ in range(self._engine.num_aux_streams)]
        self._memory_bytes = int(self._engine.device_memory_size_v2)
        self._memory = memory.allocate(self._memory_bytes)
        self._unread = {
            name: memory.allocate(_output_bytes(self._engine, name, manifest.max_batch_size))
            for name in _hidden_outputs(manifest)
        }
        self._cache: RuntimeCache | None = None
        if flavour.has_runtime_cache:
            cache = self._engine.create_runtime_config().create_runtime_cache()
            self._cache = RuntimeCache(directory / files.runtime_cache, cache)
        self._configs: dict[bool, Any] = {}  # by `for_graph`; contexts may refer to theirs

    @property
    def unread(self) -> Mapping[str, int]:
        """The addresses of outputs that the manifest does not have, by their names."""
        return {name: buffer.pointer for name, buffer in self._unread.items()}

    def new_context(self, *, for_graph: bool = False) -> Any:
        """Return an execution context that uses the shared memory.

        Args:
            for_graph: it runs the same shapes again and again, and a graph of it must not change.

        Raises:
            BackendError: the GPU is out of memory, or a plugin failed.
        """
        with self.plugin_calls():
            context = self._engine.create_execution_context(self._how(for_graph=for_graph))
        if context is None:
            raise BackendError("no execution context: the GPU is out of memory for this engine")
        context.set_aux_streams([stream.handle for stream in self._aux_streams])
        context.set_device_memory(self._memory.pointer, self._memory_bytes)
        return context

    @contextmanager
    def plugin_calls(self) -> Iterator[None]:
        """Let TensorRT call the LoRA plugin, one engine at a time, and raise what went wrong in it.

        Raises:
            BackendError: the plugin failed; what the block raised is its context.
        """
        if self._plugins is None:
            yield
            return
        with self._plugins.failures.collected() as failures:
            try:
                yield
            finally:
                if failures:
                    raise BackendError(f"the LoRA plugin failed: {summary(failures)}")

    def save_cache(self) -> None:
        """Write the runtime cache, where there is one; never raises for a file."""
        if self._cache is not None:
            self._cache.save()

    def _how(self, *, for_graph: bool) -> Any:
        """Argument of `create_execution_context`: a strategy, or a config for TensorRT-RTX."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is None:
            return strategy
        if for_graph not in self._configs:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.set_runtime_cache(self._cache.cache)
            if for_graph:  # lazily, a better kernel would come after the capture, and not into it
                kinds = self._trt.DynamicShapesKernelSpecializationStrategy
                config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER
            self._configs[for_graph] = config
        return self._configs[for_graph]


@contextmanager
def _mapped(file: Path) -> Iterator[mmap]:
    """The bytes of a file, which take no memory that the system could not have back."""
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as pages:
        yield pages


def _check_interface(trt: Any, engine: Any, file: Path, manifest: Manifest) -> None:
    """The manifest must speak of this very plan, whose shapes may say less than a graph's."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    hidden = _hidden_outputs(manifest)
    if missing := hidden.difference(names):
        raise BackendError(
            f"{file} lacks {', '.join(missing)}, which its manifest says it has; copy or build the "
            "engine again"
        )
    names = [name for name in names if name not in hidden]
    modes = {name: engine.get_tensor_mode(name) for name in names}
    inputs, outputs = (
        [_port(engine, name) for name in names if modes[name] == mode]
        for mode in (trt.TensorIOMode.INPUT, trt.TensorIOMode.OUTPUT)
    )
    check_interface(file, manifest, inputs, outputs, are_shapes_known=False)


def _hidden_outputs(manifest: Manifest) -> frozenset[str]:
    return frozenset([SECOND_STREAM] if manifest.second_stream else [])


def _output_bytes(engine: Any, name: str, rows: int) -> int:
    """The most that an output takes whose first dimension is the batch; no value has 8 bytes."""
    sizes: tuple[int, ...] = tuple(engine.get_tensor_shape(name))
    return 4 * rows * math.prod(sizes[1:])


def _port(engine: Any, name: str) -> Port:
    dtype = str(engine.get_tensor_dtype(name).name)
    sizes = (size if size >= 0 else None for size in engine.get_tensor_shape(name))
    return Port(name, _DTYPES.get(dtype, dtype), tuple(sizes))
