"""A TensorRT without a GPU: a stand-in for `tensorrt_rtx`, with a tiny engine on a `FakeCuda`."""

import sys
import weakref
from collections.abc import Callable, Mapping
from enum import IntEnum
from importlib.machinery import ModuleSpec
from mmap import mmap
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import ALIGNMENT, Block, Work
from support.fakes.fake_tensorrt_config import (
    AllocationStrategy,
    IRuntimeConfig,
    IRuntimeConfigOfRTX,
    SpecializationStrategy,
)
from support.fakes.fake_tensorrt_interface import Dims, EngineInterface, TensorIOMode
from support.fakes.fake_topk import TopKDriver
from support.fakes.tiny_engine import (
    ACTIVATION_BYTES,
    ENCODER_PLAN,
    PLAN,
    small_manifest,
    tiny_encoder,
    tiny_model,
)

from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

Compute = Callable[[Mapping[str, Array]], dict[str, Array]]


class FakeLogger:
    """Takes messages of at least a severity."""

    class Severity(IntEnum):
        """TensorRT's levels."""

        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    ERROR = Severity.ERROR

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        self.min_severity = min_severity


class FakeTensorRT(ModuleType):
    """The module `tensorrt_rtx`, or `tensorrt`."""

    Logger = FakeLogger
    ExecutionContextAllocationStrategy = AllocationStrategy
    DynamicShapesKernelSpecializationStrategy = SpecializationStrategy
    TensorIOMode = TensorIOMode

    def __init__(self, cuda: FakeCuda, name: str = "tensorrt_rtx") -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.cuda = cuda
        self.manifest = small_manifest()
        self.driver = TopKDriver(cuda)
        self.refusals: set[str] = set()  # methods that answer False or None
        self.contexts: weakref.WeakSet[IExecutionContext] = weakref.WeakSet()
        self.bound: list[str] = []  # tensors whose address was set, in order
        self.profiles: list[int] = []  # profile of every run that was enqueued or captured
        self.capturable = True  # what TensorRT-RTX says of every context
        self.plugin_waits = False  # a plugin synchronises inside a run
        self.nodes: list[Any] = []  # plugins of the engine
        self.stream = 0  # of the run that was enqueued last
        self.plan: bytes | mmap = b""  # that was deserialised last
        self.aux_streams = 0  # of it
        self.call_plugin: Callable[[], object] = lambda: None  # when a plan is loaded, and in runs
        self.environment = b"a GPU and its driver"  # a runtime cache is of one

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what `import tensorrt_rtx` finds; its library, which needs an alias, is not loaded."""
        monkeypatch.setitem(sys.modules, self.__name__, self)
        self.driver.install(monkeypatch)
        monkeypatch.setattr(
            "trt_lora.plugins.tensorrt.flavour.load_alias", lambda soname, needed: None
        )

    def supports(self, *capabilities: str) -> None:
        """Be for these GPUs alone, as TensorRT-RTX is; none: no list, as in full TensorRT."""
        names = ["NONE", "CURRENT", *(f"SM{each.replace('.', '')}" for each in capabilities)]
        self.ComputeCapability = IntEnum("ComputeCapability", names)  # type: ignore[misc]

    def Runtime(self, logger: FakeLogger) -> "Runtime":
        """Return a runtime, which keeps the logger."""
        return Runtime(self, logger)

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT-RTX."""
        return self.__name__ == "tensorrt_rtx"


class Runtime:
    """Loads plans."""

    def __init__(self, trt: FakeTensorRT, logger: FakeLogger) -> None:
        self._trt = trt
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes | mmap) -> "ICudaEngine | None":
        """Return the engine of a plan, which keeps the runtime, or None."""
        self._trt.call_plugin()
        self._trt.plan = serialized_engine
        plan, manifest = bytes(serialized_engine), self._trt.manifest
        if "deserialize_cuda_engine" in self._trt.refusals:
            return None
        if plan == ENCODER_PLAN and manifest.encoder:
            return ICudaEngine(self._trt, self, manifest.of_encoder, tiny_encoder)
        return ICudaEngine(self._trt, self, manifest, tiny_model) if plan == PLAN else None


class ICudaEngine(EngineInterface):
    """A plan on the GPU."""

    def __init__(
        self, trt: FakeTensorRT, runtime: Runtime, manifest: Manifest, compute: Compute
    ) -> None:
        super().__init__(manifest)
        self.manifest, self.compute = manifest, compute
        self._trt = trt
        self._runtime = runtime
        self.device = trt.cuda.current_device
        weakref.finalize(self, _check_device, trt.cuda, self.device, "an engine is destroyed")

    @property
    def device_memory_size_v2(self) -> int:
        """What a context needs for its activations, in the largest profile."""
        return ACTIVATION_BYTES

    @property
    def num_aux_streams(self) -> int:
        """How many streams a run uses beside its own."""
        return self._trt.aux_streams

    def create_runtime_config(self) -> "IRuntimeConfig":
        """Return a configuration for contexts; only TensorRT-RTX's knows of a cache."""
        return IRuntimeConfigOfRTX(self._trt) if self._trt.is_rtx else IRuntimeConfig()

    def create_execution_context(
        self, strategy: "AllocationStrategy | IRuntimeConfig"
    ) -> "IExecutionContext | None":
        """Return a context, which keeps the engine, or None."""
        _check_device(self._trt.cuda, self.device, "a context is made")
        if "create_execution_context" in self._trt.refusals:
            return None
        config = IRuntimeConfig()
        if isinstance(strategy, IRuntimeConfig):
            config = strategy
        else:
            config.set_execution_context_allocation_strategy(strategy)
        kind = ContextOfRTX if self._trt.is_rtx else IExecutionContext
        return kind(self._trt, self, config)


class IExecutionContext:
    """Shapes and addresses of one run after another."""

    def __init__(self, trt: FakeTensorRT, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        self._trt = trt
        self._engine = engine
        self.config = config
        self._memory: list[Block] = []  # for activations
        self.aux_streams: list[int] = []
        self._ready = False  # it ran once with all that is set
        self._profile = 0
        self._inputs = {binding.name: binding for binding in engine.manifest.inputs}
        self._outputs = {binding.name: binding for binding in engine.manifest.outputs}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._token = object()
        self._captured: list[Work] = []  # part of graphs
        trt.contexts.add(self)
        weakref.finalize(self, _destroyed, trt.cuda, self._token, self._captured)
        weakref.finalize(self, _check_device, trt.cuda, engine.device, "a context is destroyed")
        for node in trt.nodes:
            clone = node.attach_to_context(None)
            clone.get_capability_interface(None)
            weakref.finalize(self, clone.destroy)

    def set_aux_streams(self, aux_streams: list[int]) -> None:
        """Use these streams beside that of a run."""
        self.aux_streams = aux_streams

    def set_device_memory(self, memory: int, size: int) -> None:
        """Use this memory for activations."""
        if self.config.strategy is not AllocationStrategy.USER_MANAGED:
            self._trt.cuda.violate("TensorRT: this context allocates its memory itself")
        if size < ACTIVATION_BYTES or memory % ALIGNMENT:
            self._trt.cuda.violate("TensorRT: the memory of a context is too small or not aligned")
        self._memory = self._trt.cuda.blocks_at(memory, size, "TensorRT: memory of a context")

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Choose a profile; shapes and addresses are to be set again."""
        self._profile = -1  # unknown, if it is refused
        if "set_optimization_profile_async" in self._trt.refusals:
            return False
        self._change()
        self._shapes.clear()
        self._addresses.clear()
        self._profile = profile_index
        switch = Work("a profile switch", stream_handle, (), lambda: None, owner=self._token)
        self._trt.cuda.enqueue(switch)
        return profile_index < len(self._engine.manifest.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Set the shape of an input; False if the profile does not allow it."""
        if not isinstance(shape, tuple | list) or "set_input_shape" in self._trt.refusals:
            return False
        if self._profile < 0:
            self._trt.cuda.violate("TensorRT: a profile was refused, and none chosen since")
        ranges = list(self._engine.manifest.profiles.values())[self._profile]
        if name not in ranges or len(shape) != len(ranges[name].min):
            return False
        limits = zip(ranges[name].min, shape, ranges[name].max, strict=True)
        if not all(low <= size <= high for low, size, high in limits):
            return False
        self._change()
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Set the address of an input or output."""
        if name not in self._inputs | self._outputs or "set_tensor_address" in self._trt.refusals:
            return False
        if not memory or memory % ALIGNMENT:
            self._trt.cuda.violate(f"TensorRT: the address {memory:#x} of {name} is not aligned")
        self._change()
        self._addresses[name] = memory
        self._trt.bound.append(name)
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        """Return the shape of a tensor, -1 where an input decides that is not set."""
        if name in self._inputs:
            return Dims(self._shapes[name])
        sizes: dict[str, int] = {}
        for binding in self._inputs.values():
            if binding.name in self._shapes:
                pairs = zip(binding.shape, self._shapes[binding.name], strict=True)
                sizes.update((symbol, size) for symbol, size in pairs if isinstance(symbol, str))
        shape = self._outputs[name].shape
        return Dims(tuple(sizes.get(d, -1) if isinstance(d, str) else d for d in shape))

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Enqueue a run; it reads the inputs when its turn comes."""
        if "execute_async_v3" in self._trt.refusals or self._trt.cuda.last_error:
            return False
        cuda, places = self._trt.cuda, {}
        _check_device(cuda, self._engine.device, "a run begins")
        captured = cuda.is_captured(stream_handle)
        if self.config.strategy is AllocationStrategy.USER_MANAGED and not self._memory:
            cuda.violate("TensorRT: the context has no memory")
        if captured and not self._ready:
            cuda.violate("TensorRT: a context has to run once before it is captured")
        if stream_handle == 0:
            cuda.violate("TensorRT: the default stream costs an extra wait")
        self._check_aliases()
        if not {stream_handle, *self.aux_streams} <= {*cuda.live_streams()}:
            cuda.violate("TensorRT: a run on a stream that is not there")
        for name, binding in (self._inputs | self._outputs).items():
            if name not in self._addresses or (name in self._inputs and name not in self._shapes):
                cuda.violate(f"TensorRT: shape or address of {name} is not set")
            shape = tuple(self.get_tensor_shape(name))
            places[name] = (self._addresses[name], shape, storage_dtype(binding.dtype))
        views = {
            name: cuda.view(address, int(np.prod(shape)) * dtype.itemsize)
            .view(dtype)
            .reshape(shape)
            for name, (address, shape, dtype) in places.items()
        }
        blocks = [
            block
            for name, (address, _, _) in places.items()
            for block in cuda.blocks_at(address, views[name].nbytes, f"TensorRT: {name}")
        ]

        compute = self._engine.compute  # the work must not keep the context

        def run() -> None:
            for name, value in compute(views).items():
                views[name][...] = value

        work = Work("a run", stream_handle, [*blocks, *self._memory], run, owner=self._token)
        cuda.enqueue(work)
        if captured:
            self._captured.append(work)
        self._compile(places)
        self._trt.stream = stream_handle
        self._trt.call_plugin()
        if self._trt.plugin_waits:
            cuda.cudaStreamSynchronize(stream_handle)
            cuda.cudaGetLastError()
        self._ready = True
        self._trt.profiles.append(self._profile)
        return True

    def _check_aliases(self) -> None:
        """A cache and what is written in its place must have one address."""
        for output in self._outputs.values():
            source = output.in_place_of
            if source and self._addresses.get(output.name) != self._addresses.get(source):
                self._trt.cuda.violate(f"TensorRT: {output.name} is not at the address of {source}")

    def _compile(self, places: Mapping[str, tuple[int, tuple[int, ...], Any]]) -> None:
        if self.config.cache is not None:
            shapes = [f"{name}{list(shape)}" for name, (_, shape, _) in places.items()]
            self.config.cache.kernels.add(" ".join(shapes))

    def _change(self) -> None:
        """A context that changes leaves the graphs of it undefined; one that runs must not."""
        if "a run" in self._trt.cuda.pending(self._token):
            self._trt.cuda.violate("TensorRT: a context is changed while it runs")
        self._ready = False
        _make_stale(self._trt.cuda, self._captured, "its context has changed")


class ContextOfRTX(IExecutionContext):
    """TensorRT-RTX knows beforehand what can be captured."""

    def is_stream_capturable(self, stream: int) -> bool:
        """Whether runs can be captured."""
        return self._trt.capturable


def _check_device(cuda: FakeCuda, device: int, what: str) -> None:
    """Note a mistake, also in a finalizer: TensorRT works on the GPU that is current."""
    if cuda.current_device != device:
        cuda.violations.append(f"TensorRT: {what} on GPU {cuda.current_device}, not {device}")


def _make_stale(cuda: FakeCuda, captured: list[Work], why: str) -> None:
    if not captured:
        return
    for graph in cuda.graphs:
        if any(work in captured for work in graph.works):
            graph.stale = why


def _destroyed(cuda: FakeCuda, token: object, captured: list[Work]) -> None:
    if cuda.pending(token):
        cuda.violations.append("TensorRT: a context is destroyed while it runs")
    _make_stale(cuda, captured, "its context was destroyed")
