"""Engines on two GPUs in one process, used by threads whose own GPU is the first."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_driver import FakeDriver
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.models.tiny_model_runs import (
    FIRST,
    NO_ADAPTER,
    SECOND,
    bound_prompt,
    close,
    logits_of,
    manager_of,
    prompt,
)

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels import launcher as kernels
from trt_lora.plugins.kernels.launch_plan import Chip, plan_launches
from trt_lora.plugins.kernels.nvrtc import kernels_of
from trt_lora.plugins.tensorrt.plugin_node import PluginNode
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins
from trt_lora.plugins.tensorrt.plugin_shapes import group_shape
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.memory.cuda import call, on_device
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy

H200, A100 = Chip((9, 0), 132), Chip((8, 0), 108)  # GPU 0 and GPU 1
SETS = ("cudaGetDevice", "cudaSetDevice")

Result = TypeVar("Result")


@pytest.fixture
def engines(cuda: FakeCuda, trt: FakeTensorRT, tmp_path: Path) -> Iterator[list[TensorRTEngine]]:
    """An engine on each GPU; this thread has gone back to the first."""
    cuda.devices = 2
    directory = engine_directory(tmp_path / "engine")
    with ExitStack() as stack:
        opened = []
        for index in (0, 1):
            cuda.current_device = index
            opened.append(stack.enter_context(TensorRTEngine(directory, small_manifest())))
        cuda.current_device = 0
        yield opened


def in_a_thread(cuda: FakeCuda, work: Callable[[], Result]) -> Result:
    """What `work` returns in a new thread, which begins on GPU 0 and ends there."""

    def run() -> Result:
        assert cuda.current_device == 0
        result = work()
        assert cuda.current_device == 0
        return result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(20)


def test_each_engine_has_its_memory_and_its_runs_on_its_own_gpu(
    engines: list[TensorRTEngine], cuda: FakeCuda
) -> None:
    for index, engine in enumerate(engines):
        manager, tensor_map = manager_of(engine, a=FIRST), prompt(engine)
        manager.switch_weights("a")
        manager.refresh_tensor_map(tensor_map)
        before = {id(block) for block in cuda.live_blocks()}
        outputs = engine.execute(tensor_map)
        new = [block.device for block in cuda.live_blocks() if id(block) not in before]
        assert set(new) - {None} == {index}  # pinned memory is of no GPU
        assert {tensor.device for tensor in outputs.values()} == {f"cuda:{index}"}
        assert close(outputs["logits"].numpy(), FIRST)
        assert cuda.current_device == 0


def test_a_thread_loads_runs_reads_and_unloads_on_the_engines_gpu_and_keeps_its_own(
    engines: list[TensorRTEngine], cuda: FakeCuda
) -> None:
    manager, tensor_map = manager_of(engines[1], a=FIRST), prompt(engines[1])

    def work() -> None:
        engines[1].warm_up()
        manager.add_weights("b", SECOND)
        manager.switch_weights("b")
        manager.refresh_tensor_map(tensor_map)
        uploaded = engines[1].memory.upload(tensor_map)
        for name in ("input_ids", "lengths"):
            tensor_map[name] = uploaded[name]
        for _ in range(3):  # plain, captured, launched
            assert close(logits_of(engines[1], tensor_map), SECOND)
        manager.reset_weights()
        manager.unload("b")
        manager.refresh_tensor_map(tensor_map)
        assert close(logits_of(engines[1], tensor_map), NO_ADAPTER)

    in_a_thread(cuda, work)
    assert "cudaGraphLaunch" in cuda.names()


def test_tensors_are_staged_on_a_stream_of_another_gpu_than_the_threads(cuda: FakeCuda) -> None:
    cuda.devices = 2
    with on_device(1):
        stream = int(call("cudaStreamCreate"))
    memory, values = CudaMemory(1), np.arange(8)
    staged = memory.stage({"x": tensor_from_numpy(values)}, stream)
    call("cudaStreamSynchronize", stream)
    call("cudaStreamDestroy", stream)
    np.testing.assert_array_equal(staged["x"].numpy(), values)


def test_memory_of_any_gpu_is_released_wherever_garbage_is_collected(
    engines: list[TensorRTEngine], cuda: FakeCuda
) -> None:
    held: list[Any] = [engine.execute(bound_prompt(engine)) for engine in engines]
    held += [engine.memory.upload(prompt(engine)) for engine in engines]
    held += [CudaMemory(1).empty({"x": Tensor(0, (8,), "float32")})]  # its pool goes with it
    before = cuda.live_device_bytes()

    def collect() -> None:
        held.clear()
        gc.collect()

    in_a_thread(cuda, collect)
    for engine in engines:
        engine.memory.close()
    assert cuda.live_device_bytes() < before
    assert not cuda.violations


def test_a_cycle_that_is_collected_in_another_thread_frees_its_memory(cuda: FakeCuda) -> None:
    cuda.devices = 2
    holder = SimpleNamespace(tensor=CudaMemory(1).zeros(8))
    holder.itself = holder
    del holder
    in_a_thread(cuda, gc.collect)
    assert not cuda.live_blocks()


def test_memory_of_a_lost_gpu_is_let_go_of_in_silence_in_any_thread(cuda: FakeCuda) -> None:
    cuda.devices = 2
    held = [CudaMemory(1).zeros(8)]
    cuda.lose_device_at("cudaGetDevice")
    in_a_thread(cuda, held.clear)
    assert cuda.names()[-1] == "cudaFreeAsync"


def test_an_engine_is_closed_on_its_gpu_by_any_thread(
    engines: list[TensorRTEngine], cuda: FakeCuda
) -> None:
    engines[1].execute(bound_prompt(engines[1]))
    streams = len(cuda.live_streams())
    in_a_thread(cuda, lambda: engines[1].__exit__(None, None, None))
    assert len(cuda.live_streams()) == streams - 1


def test_a_gpu_that_cannot_be_chosen_is_an_error_and_nothing_is_allocated(cuda: FakeCuda) -> None:
    with pytest.raises(BackendError, match="cudaSetDevice: invalid device ordinal"):
        CudaMemory(1).zeros(8)
    assert "cudaMallocAsync" not in cuda.names()


def test_the_threads_gpu_is_restored_also_after_an_error(
    engines: list[TensorRTEngine], cuda: FakeCuda
) -> None:
    tensor_map = bound_prompt(engines[1])
    for function in ("cudaMemcpyAsync", "cudaStreamWaitEvent"):
        cuda.fail(function, Status.cudaErrorInvalidValue)
        with pytest.raises(BackendError, match="invalid argument"):
            engines[1].execute(tensor_map)
        assert cuda.current_device == 0
    assert close(logits_of(engines[1], tensor_map), NO_ADAPTER)


def test_a_run_asks_for_the_gpu_once_and_sets_it_only_where_it_is_another(
    engines: list[TensorRTEngine], cuda: FakeCuda
) -> None:
    for engine, expected in ((engines[0], [SETS[0]]), (engines[1], [*SETS, SETS[1]])):
        tensor_map = bound_prompt(engine)
        for _ in range(4):  # until a graph is launched, and nothing is allocated
            engine.execute(tensor_map)
        cuda.calls.clear()
        outputs = engine.execute(tensor_map)
        assert [name for name in cuda.names() if name in SETS] == expected
        del outputs
        assert [name for name in cuda.names() if name in SETS] == expected


# The LoRA plugin.


# So wide that a GPU without clusters runs a pair where one with them runs a launch.
SHAPES = [(1, 2, 8192), (8192, 8), (8, 32)]


@pytest.fixture
def driver(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver of two unlike GPUs, whose threads and streams are those of the runtime."""

    def compile_lora(arch: str, names: tuple[str, ...]) -> bytes:
        return "".join(f"{arch} .entry {name}()" for name in names).encode()

    monkeypatch.setattr(kernels, "compile_lora", compile_lora)
    # NVRTC, which knows, may be missing where only the runtime is installed.
    monkeypatch.setattr(kernels, "architecture_of", lambda chip: f"for {chip.version}")
    fake = FakeDriver(H200, A100, current=lambda: cuda.current_device, device_of=cuda.device_of)
    with fake.installed(monkeypatch):
        yield fake


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> LoraPlugins:
    """The LoRA plugin in a flavour that has no more than the callbacks of a run ask for."""
    bases = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime")
    flavour = SimpleNamespace(
        PluginFieldType=SimpleNamespace(INT32=0),
        PluginField=lambda *args: args,
        PluginFieldCollection=list,
        **{name: type(name, (), {}) for name in (*bases, "IPluginCreatorV3One")},
    )
    found = LoraPlugins(flavour)
    monkeypatch.setattr(
        "trt_lora.runtime.engines.tensorrt.plan.register_plugins", lambda module: found
    )
    return found


def test_kernels_are_planned_for_the_gpu_that_runs_them(
    trt: FakeTensorRT, cuda: FakeCuda, driver: FakeDriver, plugins: LoraPlugins, tmp_path: Path
) -> None:
    cuda.devices = 2
    directory = engine_directory(tmp_path / "engine")
    manifest = replace(small_manifest(), lora_plugin="plugin")
    described = [
        SimpleNamespace(dims=list(shape), type=SimpleNamespace(name="HALF")) for shape in SHAPES
    ]
    plugin: PluginNode = plugins.make(Operator(1, has_addend=False))
    plugin.on_shape_change(described, [])
    nodes = [plugin.attach_to_context(None) for _ in (0, 1)]
    trt.call_plugin = lambda: nodes[cuda.device_of(trt.stream)].enqueue(
        described, [], [0x10, 0x20, 0x30], [0x40], 0x50, trt.stream
    )
    expected = []
    with ExitStack() as stack:
        for index, chip in enumerate((H200, A100)):
            cuda.current_device = index
            trt.call_plugin, call = (lambda: None), trt.call_plugin
            engine = stack.enter_context(TensorRTEngine(directory, manifest))
            trt.call_plugin = call
            names = kernels_of("float32", has_slots=False)
            assert {(index, name) for name in names} <= driver.ready
            cuda.current_device = 0
            tensor_map = bound_prompt(engine)
            for _ in range(2):
                assert "logits" in in_a_thread(cuda, partial(engine.execute, tensor_map))
            shape = group_shape(Operator(1, has_addend=False), SHAPES, "float16")
            planned = [(index, each.kernel, each.grid) for each in plan_launches(shape, chip)]
            expected += planned * 3  # the second run is captured after it ran
        trt.call_plugin = lambda: None
    assert [(each.device, each.kernel, each.grid) for each in driver.launched] == expected
    assert {launch[1] for launch in expected if launch[0] == 0}.isdisjoint(
        launch[1] for launch in expected if launch[0] == 1
    )
    assert driver.calls.count("cuStreamGetDevice") == len(nodes)
