"""`runtime/tensorrt_backend.py` on a fake TensorRT and a fake CUDA runtime."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import fake_tensorrt
import numpy as np
import numpy.typing as npt
import pytest
from fake_cuda import FakeCuda, Status
from fake_tensorrt import (
    DOWN,
    MAX_PROMPT,
    MAX_RANK,
    PAST,
    PRESENT,
    UP,
    VOCABULARY,
    FakeTensorRT,
    engine_directory,
    expected_logits,
    signature_of,
    small_manifest,
)

from trt_lora.plugins.contract import Site
from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime import LoRAManager, TensorMap
from trt_lora.runtime.decoding import Decoder, empty_cache
from trt_lora.runtime.executor import Engine
from trt_lora.runtime.manifest import PLAN_FILE, Range
from trt_lora.runtime.tensorrt_backend import TensorRTEngine, select_profile
from trt_lora.runtime.tensors import Array, tensor_from_numpy

DECODE, PREFILL = 0, 1
IDS = np.array([3, 1, 4, 1, 5])
TOKENS = {"input_ids", "attention_mask", "position_ids", "logits_to_keep"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU on which every test must leave nothing behind."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    yield fake
    fake.check()


@pytest.fixture
def trt(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorRT]:
    """A TensorRT in which every test must leave no context behind."""
    fake = FakeTensorRT(cuda)
    fake.install(monkeypatch)
    yield fake
    assert not list(fake.contexts)


@pytest.fixture
def engine(trt: FakeTensorRT, tmp_path: Path) -> TensorRTEngine:
    """The tiny model's engine, not entered."""
    return TensorRTEngine(engine_directory(tmp_path / "engine"), small_manifest())


def adapter(rank: int, *sites: Site) -> dict[str, Array]:
    """Return weights of some sites; the same for the same rank."""
    random = np.random.default_rng(rank)
    return {
        f"lora_{factor}_{site.path}": random.normal(
            size=site.shape("A" if factor == "A" else "B", rank)
        ).astype(np.float32)
        for site in sites
        for factor in "AB"
    }


NO_ADAPTER: dict[str, Array] = {}
FIRST, SECOND = adapter(3, UP, DOWN), adapter(2, DOWN)


def manager_of(engine: Engine, **adapters: Mapping[str, Array]) -> LoRAManager:
    """Return a manager of a running engine with adapters loaded."""
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for name, weights in adapters.items():
        manager.add_weights(name, weights)
    return manager


def prompt(engine: Engine, ids: npt.NDArray[np.int64] = IDS) -> TensorMap:
    """Return the inputs of a prefill, all on the host, without LoRA bindings."""
    inputs = {
        "input_ids": ids[None],
        "attention_mask": np.ones((1, len(ids)), np.int64),
        "position_ids": np.arange(len(ids))[None],
        "logits_to_keep": np.arange(len(ids)),
    }
    tensors = {name: tensor_from_numpy(array) for name, array in inputs.items()}
    return TensorMap(tensors | empty_cache(engine.manifest, batch_size=1))


def bound_prompt(engine: Engine) -> TensorMap:
    """Return the inputs of a prefill of the base model."""
    tensor_map = prompt(engine)
    manager_of(engine).refresh_tensor_map(tensor_map)
    return tensor_map


def logits_of(engine: Engine, tensor_map: TensorMap) -> Array:
    """Run the engine and return logits [s, vocab]."""
    logits: Array = engine.execute(tensor_map)["logits"].numpy()[0]
    return logits


def close(actual: Array, weights: Mapping[str, Array], ids: npt.NDArray[np.int64] = IDS) -> bool:
    """Whether logits [s, vocab] are those of the base model with these weights."""
    return np.allclose(actual, expected_logits(ids, weights)[-len(actual) :], rtol=1e-4, atol=1e-4)


# Before and outside `with`.


def test_nothing_touches_cuda_or_tensorrt_before_with(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    assert engine.input_names[:2] == ("input_ids", "attention_mask")
    assert engine.output_names == ("logits", PRESENT)
    assert engine.memory.device == "cuda:0"
    assert not cuda.calls
    assert not list(trt.contexts)


def test_executing_before_and_after_with_says_how_to_open(engine: TensorRTEngine) -> None:
    with pytest.raises(StateError, match="closed; use: with open_engine"):
        engine.execute(TensorMap())
    with engine:
        pass
    with pytest.raises(StateError, match="closed; use: with open_engine"):
        engine.execute(TensorMap())


def test_an_engine_can_be_opened_again_after_it_was_closed(engine: TensorRTEngine) -> None:
    answers = []
    for _ in range(2):
        with engine:
            answers.append(logits_of(engine, bound_prompt(engine)))

    np.testing.assert_array_equal(answers[0], answers[1])


def test_inputs_bound_when_it_was_open_before_are_bound_again(engine: TensorRTEngine) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        present = engine.execute(tensor_map)[PRESENT]
        step = prompt(engine, IDS[:1]) | {PAST: present}
        step["attention_mask"] = tensor_from_numpy(np.ones((1, len(IDS) + 1), np.int64))
        tensor_map.update(engine.memory.upload(step))
        first = logits_of(engine, tensor_map)
    with engine:
        again = logits_of(engine, tensor_map)

    np.testing.assert_array_equal(again, first)


def test_an_engine_runs_on_the_gpu_that_is_current(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    cuda.current_device = 1
    with engine:
        outputs = engine.execute(bound_prompt(engine))

    assert {tensor.device for tensor in outputs.values()} == {"cuda:1"}


# Adapters and their numbers.


def test_base_and_adapters_give_their_numbers_in_any_order(engine: TensorRTEngine) -> None:
    with engine:
        manager, tensor_map = manager_of(engine, a=FIRST, b=SECOND), prompt(engine)
        answers: dict[str, Array] = {}
        for visit, name in enumerate(["", "a", "b", "", "a"]):
            manager.switch_weights(name) if name else manager.reset_weights()
            manager.refresh_tensor_map(tensor_map)
            answers[f"{name}{visit}"] = logits_of(engine, tensor_map)

    assert close(answers["0"], NO_ADAPTER)
    assert close(answers["a1"], FIRST)
    assert close(answers["b2"], SECOND)
    assert not close(answers["b2"], FIRST)
    np.testing.assert_array_equal(answers["3"], answers["0"])
    np.testing.assert_array_equal(answers["a4"], answers["a1"])


def test_an_adapter_is_uploaded_as_one_buffer_by_one_copy(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        manager = manager_of(engine)
        before = cuda.names()
        manager.add_weights("a", FIRST)
        after = cuda.names()[len(before) :]
        manager.switch_weights("a")
        pointers = [manager.get_active_weight(name).pointer for name in FIRST]

    assert after.count("cudaMallocAsync") == after.count("cudaMemcpyAsync") == 1
    assert cuda.copies[-1].source_is_pinned
    assert len(set(pointers)) == len(FIRST)
    assert not any(pointer % 256 for pointer in pointers)


def test_all_dummies_lie_in_one_buffer_of_zeros(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    with engine:
        tensor_map = TensorMap()
        manager_of(engine).refresh_tensor_map(tensor_map)

    assert set(tensor_map) == set(engine.manifest.lora_bindings)
    assert len({tensor.pointer for tensor in tensor_map.values()}) == 1
    assert len(cuda.live_blocks()) == 1
    assert not any(tensor.numpy().any() for tensor in tensor_map.values())


def test_switching_asks_nothing_of_cuda_or_tensorrt(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        manager, tensor_map = manager_of(engine, a=FIRST, b=SECOND), TensorMap()
        before, pointers = list(cuda.calls), []
        for name in ["a", "b", "a"]:
            manager.switch_weights(name)
            manager.refresh_tensor_map(tensor_map)
            pointers.append({binding: t.pointer for binding, t in tensor_map.items()})
        manager.reset_weights()
        manager.refresh_tensor_map(tensor_map)

        assert cuda.calls == before
        assert not trt.bound
        assert pointers[0] == pointers[2] != pointers[1]


def test_an_adapter_that_cannot_be_uploaded_leaves_memory_and_manager_as_they_were(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        manager = manager_of(engine, a=FIRST)
        before = len(cuda.live_blocks())
        for function in ("cudaMallocAsync", "cudaMallocHost", "cudaMemcpyAsync"):
            cuda.fail(function, Status.cudaErrorMemoryAllocation)
            with pytest.raises(BackendError, match="out of memory"):
                manager.add_weights("b", SECOND)
            assert len(cuda.live_blocks()) == before
            assert manager.get_adapter_names() == ["a"]
        manager.add_weights("b", SECOND)


# What a run moves, and what it binds.


def test_a_prompt_and_its_continuation_give_the_logits_of_the_whole_sequence(
    engine: TensorRTEngine,
) -> None:
    ids = np.array([2, 7, 1, 8, 2, 8])
    with engine:
        manager, tensor_map = manager_of(engine, a=FIRST), TensorMap()
        manager.switch_weights("a")
        manager.refresh_tensor_map(tensor_map)
        decoder = Decoder(engine, tensor_map, batch_size=2)
        padded = np.stack([ids[:4], np.array([0, 0, *ids[:2]])])
        mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
        steps = [decoder.step(padded, mask)]
        for column in (4, 5):
            rows = np.array([[ids[column]], [ids[column - 2]]])
            steps.append(decoder.step(rows, np.ones_like(rows)))

    for row, start in ((0, 4), (1, 2)):
        for taken, logits in enumerate(steps):
            assert close(logits[row], FIRST, ids[: start + taken])


def test_a_decoding_step_uploads_the_tokens_in_one_copy_and_leaves_the_cache_where_it_is(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        present = engine.execute(tensor_map)[PRESENT]
        tensor_map.update(prompt(engine, IDS[:1]) | {PAST: present})
        tensor_map["attention_mask"] = tensor_from_numpy(np.ones((1, 6), np.int64))
        copies = len(cuda.copies)
        outputs = engine.execute(tensor_map)

        (copy,) = cuda.copies[copies:]
        assert copy.nbytes == len(TOKENS) * 256
        assert [copy.stream] == cuda.live_streams()
        assert outputs[PRESENT].shape == (1, 1, 6, 4)
        np.testing.assert_array_equal(outputs[PRESENT].numpy()[:, :, :5], present.numpy())
    assert trt.profiles == [PREFILL, DECODE]


def test_a_run_sets_only_the_shapes_and_addresses_that_changed(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
        manager, tensor_map = manager_of(engine, b=SECOND), prompt(engine)
        manager.refresh_tensor_map(tensor_map)
        tensor_map.update(engine.memory.upload(tensor_map))
        engine.execute(tensor_map)
        assert sorted(trt.bound) == sorted([*engine.input_names, *engine.output_names])

        trt.bound.clear()
        engine.execute(tensor_map)
        assert trt.bound == ["logits", PRESENT]

        trt.bound.clear()
        manager.switch_weights("b")
        manager.refresh_tensor_map(tensor_map)
        assert close(logits_of(engine, tensor_map), SECOND)
        assert sorted(trt.bound) == sorted(["logits", PRESENT, *SECOND])


def test_a_shape_that_changes_at_the_same_address_is_set(engine: TensorRTEngine) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        manager = manager_of(engine, wide=adapter(MAX_RANK, UP))
        manager.switch_weights("wide")
        manager.refresh_tensor_map(tensor_map)
        engine.execute(tensor_map)
        name_a, name_b = (f"lora_{factor}_{UP.path}" for factor in "AB")
        for name, shape in ((name_a, UP.shape("A", 1)), (name_b, UP.shape("B", 1))):
            tensor_map[name] = replace(tensor_map[name], shape=shape)
        narrow = logits_of(engine, tensor_map)
        weights = {name: tensor_map[name].numpy() for name in (name_a, name_b)}

    assert close(narrow, weights)


def test_every_input_is_bound_again_after_a_profile_switch(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        present = engine.execute(tensor_map)[PRESENT]
        trt.bound.clear()
        tensor_map.update(prompt(engine, IDS[:1]) | {PAST: present})
        tensor_map["attention_mask"] = tensor_from_numpy(np.ones((1, 6), np.int64))
        engine.execute(tensor_map)

        assert sorted(trt.bound) == sorted([*engine.input_names, *engine.output_names])


# Lifetimes.


def test_outputs_outlive_the_engine_and_are_freed_when_released(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        outputs = engine.execute(bound_prompt(engine))

    assert len(cuda.live_blocks()) == 1
    assert close(outputs["logits"].numpy()[0], NO_ADAPTER)
    del outputs
    assert not cuda.live_blocks()


def test_repeated_runs_keep_no_more_memory_than_one(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        sizes = []
        for _ in range(3):
            outputs = engine.execute(tensor_map)
            sizes.append(len(cuda.live_blocks()))
            del outputs

    assert sizes == [2, 2, 2]  # the zeros and the outputs; the tokens are gone


def test_leaving_with_gives_back_context_and_stream_but_keeps_the_adapters(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        manager = manager_of(engine, a=FIRST)
        assert len(list(trt.contexts)) == len(cuda.live_streams()) == 1

    assert not list(trt.contexts)
    assert not cuda.live_streams()
    manager.switch_weights("a")
    for name, values in FIRST.items():
        np.testing.assert_array_equal(manager.get_active_weight(name).numpy(), values)


def test_an_interrupted_run_is_waited_for_before_its_memory_is_freed(
    engine: TensorRTEngine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake_tensorrt.IExecutionContext.execute_async_v3

    def interrupted(self: fake_tensorrt.IExecutionContext, stream_handle: int) -> bool:
        start(self, stream_handle)
        raise KeyboardInterrupt

    with engine:
        tensor_map = bound_prompt(engine)
        with monkeypatch.context() as patch:
            patch.setattr(fake_tensorrt.IExecutionContext, "execute_async_v3", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.execute(tensor_map)

        assert len(cuda.live_blocks()) == 1  # the zeros
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


# Errors on the way in.


def test_a_plan_that_is_refused_says_what_built_it_and_leaves_nothing_open(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    (engine.directory / PLAN_FILE).write_bytes(b"a plan of another version")

    with pytest.raises(BackendError, match=r"tensorrt-rtx refuses .*'1\.7'.*build it on this"):
        engine.__enter__()

    assert not cuda.live_streams()


@pytest.mark.parametrize("method", ["deserialize_cuda_engine", "create_execution_context"])
def test_an_engine_that_cannot_be_loaded_stays_closed_and_can_be_tried_again(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT, method: str
) -> None:
    trt.refusals.add(method)
    with pytest.raises(BackendError), engine:
        pytest.fail("the engine is open")
    with pytest.raises(StateError, match="closed"):
        engine.execute(TensorMap())
    assert not cuda.live_streams()
    assert not list(trt.contexts)

    trt.refusals.clear()
    with engine:
        assert close(logits_of(engine, bound_prompt(engine)), NO_ADAPTER)


@pytest.mark.parametrize("function", ["cudaGetDevice", "cudaStreamCreate"])
def test_an_engine_without_a_stream_stays_closed_and_keeps_no_context(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT, function: str
) -> None:
    cuda.fail(function, Status.cudaErrorMemoryAllocation)
    with pytest.raises(BackendError, match=f"{function}: out of memory"), engine:
        pytest.fail("the engine is open")
    with pytest.raises(StateError, match="closed"):
        engine.execute(TensorMap())

    assert not list(trt.contexts)


def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    engine: TensorRTEngine, trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, trt.__name__, None)

    with pytest.raises(BackendError, match=r"tensorrt-rtx cannot be imported.*trt-lora\[rtx\]"):
        engine.__enter__()


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
        before = list(cuda.calls)
        with pytest.raises(TensorError, match="input_ids is int32; this engine takes int64"):
            engine.execute(tensor_map)
        assert cuda.calls == before


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
        "decode: [1, 1] to [2, 1]; prefill: [1, 1] to [2, 8]"
    )
    assert not trt.profiles


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("set_input_shape", TensorError, r"refuses shape \[1, 5\] for input_ids"),
        ("set_tensor_address", TensorError, r"refuses address 0x[0-9a-f]+ for input_ids"),
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


def test_an_address_refused_after_its_shape_was_set_is_not_taken_for_bound(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
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
        manager.reset_weights()
        manager.refresh_tensor_map(tensor_map)
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


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
    logits, present = trt.manifest.outputs
    counted = replace(logits, shape=("batch", "found", VOCABULARY))
    trt.manifest = replace(trt.manifest, outputs=(counted, present))

    with (
        engine,
        pytest.raises(BackendError, match=r"the shape of logits is unknown.*\[1, -1, 11\]"),
    ):
        engine.execute(bound_prompt(engine))


# The choice of a profile.


def shapes_of(sequence: int, past: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a run of the base model."""
    manifest = small_manifest()
    sizes = {
        "batch": 1,
        "sequence": sequence,
        "past": past,
        "total": past + sequence,
        "kept": 1,
        "rank": 1,
    }
    return {
        binding.name: tuple(sizes[d] if isinstance(d, str) else d for d in binding.shape)
        for binding in manifest.inputs
    }


@pytest.mark.parametrize(
    ("sequence", "past", "profile"),
    [(1, 3, DECODE), (5, 0, PREFILL), (1, 0, PREFILL), (2, 3, PREFILL)],
)
def test_the_first_profile_that_allows_the_shapes_is_taken(
    sequence: int, past: int, profile: int
) -> None:
    assert select_profile(small_manifest(), shapes_of(sequence, past)) == profile


def test_a_tensor_with_another_number_of_dimensions_fits_no_profile() -> None:
    shapes = shapes_of(1, 3) | {"logits_to_keep": (1, 1)}

    with pytest.raises(TensorError, match=r"logits_to_keep has shape \[1, 1\]"):
        select_profile(small_manifest(), shapes)


def test_a_range_is_inclusive_at_both_ends() -> None:
    manifest = replace(small_manifest(), profiles={"only": {"x": Range((1, 2), (1, 2), (3, 2))}})

    assert select_profile(manifest, {"x": (1, 2)}) == select_profile(manifest, {"x": (3, 2)}) == 0
    for shape in ((0, 2), (4, 2), (3, 1), (3, 3)):
        with pytest.raises(TensorError, match=r"allows only: \[1, 2\] to \[3, 2\]"):
            select_profile(manifest, {"x": shape})


# The fake.


@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="needs tensorrt-rtx")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("Runtime", "deserialize_cuda_engine"),
        ("ICudaEngine", "create_execution_context"),
        ("IExecutionContext", "set_optimization_profile_async"),
        ("IExecutionContext", "set_input_shape"),
        ("IExecutionContext", "set_tensor_address"),
        ("IExecutionContext", "get_tensor_shape"),
        ("IExecutionContext", "execute_async_v3"),
    ],
)
def test_the_fake_methods_have_the_parameters_of_the_real_ones(kind: str, method: str) -> None:
    real = importlib.import_module("tensorrt_rtx")

    ours = list(inspect.signature(getattr(getattr(fake_tensorrt, kind), method)).parameters)
    theirs = signature_of(getattr(getattr(real, kind), method))

    assert any(ours == names[: len(ours)] for names in theirs), theirs
