"""Runs of a TensorRT engine that fail or are refused: an error by name; the next run is right."""

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.fakes import fake_tensorrt, fake_tensorrt_config
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import (
    DECODE,
    MAX_PROMPT,
    MAX_TOKENS,
    PREFILL,
    UP,
    VOCABULARY,
    small_manifest,
)
from support.models.tiny_model_runs import (
    FIRST,
    IDS,
    NO_ADAPTER,
    bound_prompt,
    close,
    logits_of,
    manager_of,
    prompt,
    step,
)
from support.signatures import signature_of

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.tensorrt.inputs import RunInputs
from trt_lora.runtime.engines.tensorrt.run_key import RunState
from trt_lora.runtime.manifest import Binding, Manifest, Range
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy

# Errors of a run.


def test_a_map_that_lacks_inputs_is_refused(engine: TensorRTEngine) -> None:
    with engine, pytest.raises(TensorError, match=r"lacks lora_A.* 1 more; .*refresh_tensor_map"):
        engine.execute(prompt(engine))


def test_a_wrong_dtype_is_refused_before_anything_is_uploaded(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        tensor_map["input_ids"] = tensor_from_numpy(IDS[None].astype(np.int32))
        cuda.calls.clear()
        with pytest.raises(TensorError, match="input_ids is int32; this engine takes int64"):
            engine.execute(tensor_map)
        assert cuda.names() == ["cudaGetDevice"]


def test_a_tensor_of_another_gpu_is_refused_at_run_time_too(engine: TensorRTEngine) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        name = f"lora_A_{UP.path}"
        tensor_map[name] = replace(tensor_map[name], device="cuda:1")
        with pytest.raises(TensorError, match=f"{name} is on cuda:1, the engine on cuda:0"):
            engine.execute(tensor_map)


def test_an_address_that_is_not_aligned_never_reaches_tensorrt(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        name = f"lora_A_{UP.path}"
        tensor_map[name] = replace(tensor_map[name], pointer=tensor_map[name].pointer + 4)
        with pytest.raises(TensorError, match=f"{name} is at address .* no multiple of 256"):
            engine.execute(tensor_map)
        assert not trt.bound


def test_a_shape_beyond_all_profiles_is_refused_with_what_they_allow(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        tensor_map.update(prompt(engine, np.zeros(MAX_PROMPT + 1, np.int64)))
        with pytest.raises(TensorError) as caught:
            engine.execute(tensor_map)

    assert str(caught.value) == (
        "input_ids has shape [1, 9]; this engine allows "
        "decode: [1, 1] to [4, 1]; prefill: [1, 1] to [4, 8]"
    )
    assert not trt.profiles


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("set_input_shape", TensorError, r"refuses shape \[1, 1, 16, 4\] for cache"),
        ("set_tensor_address", TensorError, r"refuses address 0x[0-9a-f]+ for cache"),
        ("set_optimization_profile_async", BackendError, "refuses optimization profile 1"),
        ("execute_async_v3", BackendError, "the engine failed to run; its own log says why"),
    ],
)
def test_a_refusal_of_tensorrt_is_an_error_and_the_next_run_is_right(
    engine: TensorRTEngine,
    trt: FakeTensorRT,
    method: str,
    error: type[Exception],
    message: str,
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        trt.refusals.add(method)
        with pytest.raises(error, match=message):
            engine.execute(tensor_map)

        trt.refusals.clear()
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


def test_a_profile_that_was_refused_is_not_taken_for_the_one_before(
    plain: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with plain as engine:
        tensor_map = bound_prompt(engine)
        trt.refusals.add("set_optimization_profile_async")
        with pytest.raises(BackendError, match="refuses optimization profile 1"):
            engine.execute(tensor_map)

        trt.refusals.clear()
        tensor_map.update(step(IDS[:1], 3, bound=MAX_TOKENS))
        engine.execute(tensor_map)
    assert trt.profiles == [DECODE]


@pytest.mark.parametrize("weights", [FIRST, NO_ADAPTER], ids=["tried again", "the one before"])
def test_an_address_refused_after_its_shape_was_set_is_not_taken_for_bound(
    plain: TensorRTEngine, trt: FakeTensorRT, weights: dict[str, Array]
) -> None:
    with plain as engine:
        manager, tensor_map = manager_of(engine, a=FIRST), prompt(engine)
        manager.refresh_tensor_map(tensor_map)
        tensor_map.update(engine.memory.upload(tensor_map))
        engine.execute(tensor_map)
        manager.switch_weights("a")
        manager.refresh_tensor_map(tensor_map)
        trt.refusals.add("set_tensor_address")
        with pytest.raises(TensorError, match="refuses address"):
            engine.execute(tensor_map)

        trt.refusals.clear()
        for run in (weights, NO_ADAPTER):
            manager.switch_weights("a") if run else manager.reset_weights()
            manager.refresh_tensor_map(tensor_map)
            assert close(logits_of(engine, tensor_map), run)


def test_a_run_that_cannot_get_memory_leaves_none_behind(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        before = len(cuda.live_blocks())
        cuda.fail("cudaMallocAsync", Status.cudaErrorMemoryAllocation)
        with pytest.raises(BackendError, match="out of memory"):
            engine.execute(tensor_map)

        assert len(cuda.live_blocks()) == before
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


def test_a_lost_device_is_reported_by_the_run_and_not_hidden_by_the_way_out(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    def run() -> None:
        with engine:
            tensor_map = bound_prompt(engine)
            tensor_map.update(engine.memory.upload(tensor_map))
            cuda.lose_device_at("cudaMallocAsync")
            engine.execute(tensor_map)

    with pytest.raises(BackendError, match="cudaMallocAsync: an illegal memory access") as caught:
        run()

    assert caught.value.__context__ is None
    assert "cudaStreamDestroy" in cuda.names()


def test_an_output_whose_shape_stays_unknown_is_an_error_and_not_a_small_buffer(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    logits, *caches = trt.manifest.outputs
    counted = replace(logits, shape=("found", VOCABULARY))
    trt.manifest = replace(trt.manifest, outputs=(counted, *caches))

    with (
        engine,
        pytest.raises(BackendError, match=r"logits has shape \[-1, 11\]; .*\[5, 11\]"),
    ):
        engine.execute(bound_prompt(engine))


# The choice of a profile.


def shapes_of(sequence: int, bound: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a run of the base model."""
    sizes = {"batch": 1, "sequence": sequence, "bound": bound, "kept": 1, "rank": 1}
    return {
        binding.name: tuple(sizes[d] if isinstance(d, str) else d for d in binding.shape)
        for binding in small_manifest().inputs
    }


def profile_of(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The profile that a run with inputs of these shapes is given."""
    memory = CudaMemory()
    inputs = {b.name: Tensor(0, shapes[b.name], b.dtype, memory.device) for b in manifest.inputs}
    return RunInputs(manifest, memory).update(TensorMap(inputs), RunState())


@pytest.mark.parametrize(
    ("sequence", "bound", "profile"),
    [(1, MAX_TOKENS, DECODE), (5, 5, PREFILL), (1, 1, PREFILL), (2, MAX_TOKENS, PREFILL)],
)
def test_the_first_profile_that_allows_the_shapes_is_taken(
    sequence: int, bound: int, profile: int
) -> None:
    assert profile_of(small_manifest(), shapes_of(sequence, bound)) == profile


def test_a_tensor_with_another_number_of_dimensions_fits_no_profile() -> None:
    shapes = shapes_of(1, 3) | {"kept": (1, 1)}

    with pytest.raises(TensorError, match=r"kept has shape \[1, 1\]"):
        profile_of(small_manifest(), shapes)


def test_a_range_is_inclusive_at_both_ends() -> None:
    profiles = {"only": {"x": Range((1, 2), (1, 2), (3, 2))}}
    inputs = (Binding("x", "float32", ("rows", 2)),)
    manifest = replace(small_manifest(), inputs=inputs, outputs=(), profiles=profiles)

    assert profile_of(manifest, {"x": (1, 2)}) == profile_of(manifest, {"x": (3, 2)}) == 0
    for shape in ((0, 2), (4, 2), (3, 1), (3, 3)):
        with pytest.raises(TensorError, match=r"allows only: \[1, 2\] to \[3, 2\]"):
            profile_of(manifest, {"x": shape})


# The fake.


REAL_KINDS = {"IRuntimeConfigOfRTX": "IRuntimeConfig", "ContextOfRTX": "IExecutionContext"}


@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="needs tensorrt-rtx")
def test_the_fake_strategies_and_properties_are_the_real_ones() -> None:
    real = importlib.import_module("tensorrt_rtx")

    for ours, theirs in (
        (fake_tensorrt_config.AllocationStrategy, real.ExecutionContextAllocationStrategy),
        (
            fake_tensorrt_config.SpecializationStrategy,
            real.DynamicShapesKernelSpecializationStrategy,
        ),
    ):
        assert {kind.name: int(kind) for kind in ours} == {
            name: int(kind) for name, kind in theirs.__members__.items()
        }
    assert hasattr(real.ICudaEngine, "device_memory_size_v2")
    assert hasattr(real.IRuntimeConfig, "dynamic_shapes_kernel_specialization_strategy")


@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="needs tensorrt-rtx")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("Runtime", "deserialize_cuda_engine"),
        ("ICudaEngine", "create_execution_context"),
        ("ICudaEngine", "create_runtime_config"),
        ("IRuntimeConfig", "set_execution_context_allocation_strategy"),
        ("IRuntimeConfigOfRTX", "create_runtime_cache"),
        ("IRuntimeConfigOfRTX", "set_runtime_cache"),
        ("IRuntimeCache", "serialize"),
        ("IRuntimeCache", "deserialize"),
        ("ContextOfRTX", "is_stream_capturable"),
        ("IExecutionContext", "set_device_memory"),
        ("IExecutionContext", "set_optimization_profile_async"),
        ("IExecutionContext", "set_input_shape"),
        ("IExecutionContext", "set_tensor_address"),
        ("IExecutionContext", "get_tensor_shape"),
        ("IExecutionContext", "execute_async_v3"),
    ],
)
def test_the_fake_methods_have_the_parameters_of_the_real_ones(kind: str, method: str) -> None:
    real = importlib.import_module("tensorrt_rtx")

    fakes = vars(fake_tensorrt) | vars(fake_tensorrt_config)
    ours = list(inspect.signature(getattr(fakes[kind], method)).parameters)
    theirs = signature_of(getattr(getattr(real, REAL_KINDS.get(kind, kind)), method))

    assert any(ours == names[: len(ours)] for names in theirs), theirs
