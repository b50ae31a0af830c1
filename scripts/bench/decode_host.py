"""Time the host's part of a decode step on a GPU, at Llama-3-8B's 448 bindings; print it as JSON.

Run by cpu.py. CUDA and TensorRT are stubs that return at once: what is left is ours. A step is
greedy: it begins the next one and takes its own candidates.
"""

import importlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time
from timeit import timeit
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from trt_lora.plugins.contract.step import CACHE, LOGITS
from trt_lora.runtime import LoRAManager, TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.generation.decoding.ranked_steps import RankedSteps
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import TOKEN_SHAPES
from trt_lora.runtime.manifest import PLAN_FILE, STATIC, Binding, Manifest, Range
from trt_lora.runtime.memory.tensor import tensor_from_numpy
from trt_lora.scripts.bench.gpu.layers.llama_manager import llama_manifest
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B

ROUNDS, STEPS = 15, 100
ROWS, MAX_LEN, RANK, HEADS, HEAD_DIM = 8, 2048, 16, 8, 128
ADAPTERS = ("a", "b")


def stub_cuda() -> Any:
    """Return a module `cuda.bindings.runtime` whose functions succeed; host memory is there."""
    cuda: Any = ModuleType("cuda.bindings.runtime")
    addresses, pinned = itertools.count(1 << 44, 1 << 34), list[Any]()

    def malloc_host(size: int) -> tuple[int, int]:
        pinned.append(np.zeros(size, np.uint8))
        return 0, pinned[-1].ctypes.data

    def function(name: str) -> Callable[..., tuple[int, ...]]:
        has_result = any(part in name for part in ("GetDevice", "Create", "End", "Instantiate"))
        result = (0, 0) if has_result else (0,)
        setattr(cuda, name, lambda *args: result)
        found: Callable[..., tuple[int, ...]] = getattr(cuda, name)
        return found

    cuda.cudaMallocAsync = lambda size, stream: (0, next(addresses))
    cuda.cudaMallocHost = malloc_host
    cuda.cudaStreamNonBlocking = cuda.cudaEventDisableTiming = 1
    cuda.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cuda.cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cuda.__getattr__ = function  # of names that are not here yet
    return cuda


def stub_driver() -> Any:
    """Return a module `cuda.bindings.driver` that launches nothing."""
    driver: Any = ModuleType("cuda.bindings.driver")
    driver.cuInit = driver.cuLaunchKernel = lambda *args: (0,)
    driver.cuLibraryLoadData = driver.cuLibraryGetKernel = lambda *args: (0, 1)
    driver.CUfunction = int
    return driver


class StubContext:
    """An execution context that takes everything."""

    def __init__(self, manifest: Manifest) -> None:
        self._outputs = {output.name: output for output in manifest.outputs}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Keep it."""
        self._shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return what the engine expects."""
        source = self._outputs[name].in_place_of
        if source:
            return self._shapes[source]
        return (*self._shapes["kept"], LLAMA_3_8B.vocabulary)

    def __getattr__(self, name: str) -> Callable[..., bool]:
        """Return a method that succeeds."""
        return lambda *args: True


class StubEngine:
    """A plan with the inputs and outputs of a manifest."""

    device_memory_size_v2 = 256

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._bindings = {b.name: b for b in (*manifest.inputs, *manifest.outputs)}
        self.num_io_tensors = len(self._bindings)

    def get_tensor_name(self, index: int) -> str:
        return list(self._bindings)[index]

    def get_tensor_mode(self, name: str) -> str:
        is_input = any(binding.name == name for binding in self._manifest.inputs)
        return "input" if is_input else "output"

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=self._bindings[name].dtype)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self._bindings[name].shape)

    def create_execution_context(self, strategy: object) -> StubContext:
        return StubContext(self._manifest)


def stub_tensorrt(manifest: Manifest) -> Any:
    """Return a module `tensorrt` whose plans and contexts do nothing."""
    trt: Any = ModuleType("tensorrt")
    engine = StubEngine(manifest)
    trt.TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    trt.Logger = type("Logger", (), {"ERROR": 0, "__init__": lambda self, severity: None})
    trt.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    trt.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=0)
    return trt


def manifest_of_bindings() -> Manifest:
    """Return the manifest of an engine with a static cache; its logits are float32."""
    base = llama_manifest("float16")
    shape = ("batch", HEADS, MAX_LEN, HEAD_DIM)
    caches = [
        Binding(f"{CACHE}{layer}.{part}", "float16", shape)
        for layer in range(LLAMA_3_8B.layers)
        for part in ("key", "value")
    ]
    inputs = (
        *(Binding(name, "int64", shape) for name, shape in list(TOKEN_SHAPES.items())[:3]),
        Binding("bound", "bool", ("bound",)),
        *caches,
        *(Binding(n, "float16", s.shape(f, -1)) for n, (s, f) in base.lora_bindings.items()),
    )
    symbols = {"batch": ROWS, "sequence": 1, "kept": ROWS, "bound": MAX_LEN, -1: RANK}
    most = {b.name: tuple(symbols.get(d, d) for d in b.shape) for b in inputs}
    return replace(
        base,
        inputs=inputs,
        outputs=(
            Binding(LOGITS, "float32", ("kept", LLAMA_3_8B.vocabulary)),
            *(replace(cache, name=f"new_{cache.name}", in_place_of=cache.name) for cache in caches),
        ),
        profiles={
            "decode": {
                name: Range(tuple(1 for _ in sizes), sizes, sizes)  # type: ignore[arg-type]
                for name, sizes in most.items()
            }
        },
        max_batch_size=ROWS,
        max_seq_len=MAX_LEN,
        flavour="tensorrt",
        kv_cache=STATIC,
    )


def main() -> None:
    """Print microseconds as JSON."""
    manifest = manifest_of_bindings()
    sys.modules["cuda.bindings.runtime"] = stub_cuda()
    importlib.import_module("cuda.bindings.nvrtc")  # compiles, and wants the driver's own module
    sys.modules["cuda.bindings.driver"] = stub_driver()
    sys.modules["tensorrt"] = stub_tensorrt(manifest)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / PLAN_FILE).write_bytes(b"")
        with TensorRTEngine(Path(directory), manifest) as engine:
            print(json.dumps(measure(engine)))


def measure(engine: TensorRTEngine) -> dict[str, float]:
    """Return microseconds of a step, and of a switch to another adapter with its step."""
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for name in ADAPTERS:
        manager.add_weights(name, _weights(engine.manifest))
    maps = [_bindings(manager, name) for name in ADAPTERS]
    decoder = StaticDecoder(engine, maps[0], ROWS)
    decoder.cache.admit(0)
    steps = RankedSteps(engine, engine.memory, decoder.cache)
    turns = itertools.cycle(maps)

    def step(*, ahead: bool = True) -> None:
        steps.run({0: 0}, {0: 0.0}, decoder.adapter, ahead=ahead)
        decoder.cache.lengths[0] = 1

    def switch() -> None:
        steps.drop()
        decoder.use_adapter(next(turns))
        step(ahead=False)

    times = {"switch": _median_us(switch), "step": _median_us(step)}
    return times | {"bindings": len(engine.manifest.lora_bindings)}


def _median_us(run: Callable[[], None]) -> float:
    """Processor time of a call, which a busy machine lengthens less than the clock's."""
    for _ in range(4):
        run()  # graphs are captured
    samples = (timeit(run, timer=process_time, number=STEPS) for _ in range(ROUNDS))
    return statistics.median(samples) / STEPS * 1e6


def _weights(manifest: Manifest) -> dict[str, object]:
    return {
        name: tensor_from_numpy(np.zeros(site.shape(factor, RANK), np.float16))
        for name, (site, factor) in manifest.lora_bindings.items()
    }


def _bindings(manager: LoRAManager, name: str) -> TensorMap:
    manager.switch_weights(name)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


if __name__ == "__main__":
    main()
