"""`runtime/engines/tensorrt/engine.py` on a fake TensorRT and a fake CUDA runtime."""

import importlib
import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import fake_tensorrt
from support.fake_cuda import FakeCuda
from support.fake_cuda_state import Status
from support.fake_tensorrt import FakeTensorRT, signature_of
from support.tiny_engine import (
    MAX_PROMPT,
    MAX_RANK,
    PAST,
    PRESENT,
    UP,
    VOCABULARY,
    engine_directory,
    small_manifest,
)
from support.tiny_model_runs import (
    FIRST,
    IDS,
    NO_ADAPTER,
    SECOND,
    adapter,
    bound_prompt,
    close,
    logits_of,
    manager_of,
    prompt,
)

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.plugins.tensorrt.plugin_failures import PluginFailures
from trt_lora.runtime import TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.tensorrt.inputs import select_profile
from trt_lora.runtime.generation.decoder import Decoder
from trt_lora.runtime.manifest import PLAN_FILE, Range
from trt_lora.runtime.memory.cuda import call
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

DECODE, PREFILL = 0, 1
TOKENS = {"input_ids", "attention_mask", "position_ids", "logits_to_keep"}


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
    cuda.devices, cuda.current_device = 2, 1
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
        before = len(cuda.live_blocks())
        tensor_map = TensorMap()
        manager_of(engine).refresh_tensor_map(tensor_map)
        assert len(cuda.live_blocks()) == before + 1

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
        for function in ("cudaMallocAsync", "cudaEventSynchronize", "cudaMemcpyAsync"):
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
        assert copy.nbytes == (len(TOKENS) - 1) * 256 + 8  # to the end of the last one
        assert [copy.stream] == cuda.live_streams()
        assert outputs[PRESENT].shape == (1, 1, 6, 4)
        np.testing.assert_array_equal(outputs[PRESENT].numpy()[:, :, :5], present.numpy())
    assert trt.profiles == [PREFILL, DECODE]


def test_a_run_sets_only_the_shapes_and_addresses_that_changed(
    plain: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with plain as engine:
        manager, tensor_map = manager_of(engine, b=SECOND), prompt(engine)
        manager.refresh_tensor_map(tensor_map)
        tensor_map.update(engine.memory.upload(tensor_map))
        engine.execute(tensor_map)
        assert sorted(trt.bound) == sorted([*engine.input_names, *engine.output_names])

        trt.bound.clear()
        outputs = engine.execute(tensor_map)
        assert not trt.bound

        engine.execute(tensor_map)
        assert sorted(trt.bound) == ["logits", PRESENT]
        del outputs

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


def test_an_input_may_move_between_host_and_device_from_run_to_run(plain: TensorRTEngine) -> None:
    with plain as engine:
        manager = manager_of(engine, a=FIRST)
        manager.switch_weights("a")
        on_device, on_host = prompt(engine), prompt(engine)
        manager.refresh_tensor_map(on_device)
        on_host.update({name: tensor_from_numpy(array) for name, array in FIRST.items()})
        for tensor_map in (on_device, on_host, on_device, on_host):
            assert close(logits_of(engine, tensor_map), FIRST)
        on_host.update({name: tensor_from_numpy(array * 0) for name, array in FIRST.items()})
        assert close(logits_of(engine, on_host), NO_ADAPTER)


def test_inputs_that_did_not_change_are_checked_once(
    plain: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    with plain as engine:
        manager, tensor_map = manager_of(engine, b=SECOND), prompt(engine)
        manager.refresh_tensor_map(tensor_map)
        tensor_map.update(engine.memory.upload(tensor_map))
        monkeypatch.setattr(engine.memory, "check", lambda name, tensor: checked.append(name))
        engine.execute(tensor_map)
        assert sorted(checked) == sorted(engine.input_names)

        checked.clear()
        engine.execute(tensor_map)
        assert not checked

        manager.switch_weights("b")
        manager.refresh_tensor_map(tensor_map)
        engine.execute(tensor_map)
        assert sorted(checked) == sorted(SECOND)


def test_an_input_that_was_refused_is_refused_again(plain: TensorRTEngine) -> None:
    with plain as engine:
        tensor_map = bound_prompt(engine)
        name = f"lora_A_{UP.path}"
        good = tensor_map[name]
        tensor_map[name] = replace(good, device="cuda:1")
        for _ in range(2):
            with pytest.raises(TensorError, match="is on cuda:1"):
                engine.execute(tensor_map)
        tensor_map[name] = good

        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_a_run_waits_for_what_others_write_on_the_default_stream(
    engine: TensorRTEngine, cuda: FakeCuda, runs: int
) -> None:
    with engine:
        manager, tensor_map = manager_of(engine, a=FIRST), prompt(engine)
        manager.switch_weights("a")
        manager.refresh_tensor_map(tensor_map)
        for _ in range(runs - 1):  # so that the last is plain, captured, or launched
            engine.execute(tensor_map)
        for name in FIRST:
            tensor = tensor_map[name]
            call("cudaMemsetAsync", tensor.pointer, 0, tensor.nbytes, 0)

        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


# Warming up, and plugins.


def test_warming_up_runs_every_profile_and_leaves_no_memory_in_use(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        engine.warm_up()
        assert trt.profiles == [DECODE, PREFILL]
        engine.memory.close()
        assert len(cuda.live_blocks()) == 1  # activations

        assert close(logits_of(engine, bound_prompt(engine)), NO_ADAPTER)


def test_warming_up_a_closed_engine_is_refused(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    with pytest.raises(StateError, match="closed"):
        engine.warm_up()


@pytest.mark.parametrize("lora_plugin", ["native", "plugin"])
def test_plugins_are_registered_before_a_plan_that_has_them_is_loaded(
    engine: TensorRTEngine, trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch, lora_plugin: str
) -> None:
    registered: list[object] = []

    def register_plugins(module: object) -> object:
        assert not list(trt.contexts)
        registered.append(module)
        return SimpleNamespace(failures=PluginFailures())

    monkeypatch.setattr("trt_lora.runtime.engines.tensorrt.plan.register_plugins", register_plugins)
    manifest = replace(engine.manifest, lora_plugin=lora_plugin)
    with TensorRTEngine(engine.directory, manifest):
        pass

    assert registered == ([trt] if lora_plugin == "plugin" else [])


# Lifetimes.


def test_an_engine_that_is_open_is_not_opened_again(engine: TensorRTEngine) -> None:
    with engine, pytest.raises(StateError, match="open already"):
        engine.__enter__()


def session(engine: TensorRTEngine) -> None:
    """All that an engine does: open, load, warm up, run as a graph, switch, decode, close."""
    with engine:
        engine.warm_up()
        manager, tensor_map = manager_of(engine, a=FIRST), prompt(engine)
        for name in ("", "a", "a", "a"):
            manager.switch_weights(name) if name else manager.reset_weights()
            manager.refresh_tensor_map(tensor_map)
            outputs = engine.execute(tensor_map)
            assert close(outputs["logits"].numpy()[0], FIRST if name else NO_ADAPTER)
        decoder = Decoder(engine, tensor_map, batch_size=2)
        decoder.step(np.array([[1, 2], [3, 4]]), np.ones((2, 2), np.int64))
        decoder.step(np.array([[5], [6]]), np.ones((2, 1), np.int64))


def test_a_session_frees_as_much_as_it_allocates(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    session(engine)

    names = cuda.names()
    for make, give_back in (
        ("cudaMallocAsync", "cudaFreeAsync"),
        ("cudaMallocHost", "cudaFreeHost"),
        ("cudaEventCreateWithFlags", "cudaEventDestroy"),
        ("cudaStreamCreateWithFlags", "cudaStreamDestroy"),
        ("cudaStreamEndCapture", "cudaGraphDestroy"),
        ("cudaGraphInstantiate", "cudaGraphExecDestroy"),
    ):
        assert names.count(make) == names.count(give_back) > 0


def test_whichever_call_fails_nothing_is_left_and_no_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = succeeded = 0
    directory, index, done = engine_directory(tmp_path / "engine"), 0, False
    while not done:
        cuda = FakeCuda()
        cuda.install(monkeypatch)
        trt = FakeTensorRT(cuda)
        trt.install(monkeypatch)
        cuda.fail_call(index)
        try:
            session(TensorRTEngine(directory, small_manifest()))
            succeeded += 1
        except BackendError:
            failed += 1
        done = index >= len(cuda.calls)
        name = cuda.names()[min(index, len(cuda.calls) - 1)]
        if "Free" not in name and "Destroy" not in name:  # what could not be freed is still there
            cuda.check()
            assert not list(trt.contexts)
        index += 1

    assert failed > 40
    assert succeeded > 5  # without a graph, or with what could not be freed


def test_outputs_outlive_the_engine_and_are_freed_when_released(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        outputs = engine.execute(bound_prompt(engine))

    assert len(cuda.live_blocks()) == 1
    assert close(outputs["logits"].numpy()[0], NO_ADAPTER)
    del outputs
    assert not cuda.live_blocks()


def test_repeated_runs_allocate_no_more_than_one(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        sizes = []
        for _ in range(3):
            outputs = engine.execute(tensor_map)
            sizes.append(len(cuda.live_blocks()))
            del outputs

    assert sizes == [5, 5, 5]  # activations, zeros, tokens, outputs; pinned memory


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

        engine.memory.close()
        assert len(cuda.live_blocks()) == 2  # activations and zeros
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


@pytest.mark.parametrize(
    "function", ["cudaGetDevice", "cudaMallocAsync", "cudaStreamCreateWithFlags"]
)
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
        "decode: [1, 1] to [2, 1]; prefill: [1, 1] to [2, 8]"
    )
    assert not trt.profiles


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("set_input_shape", TensorError, r"refuses shape \[4, 1\] for lora_A"),
        ("set_tensor_address", TensorError, r"refuses address 0x[0-9a-f]+ for lora_A"),
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
        tensor_map.update(prompt(engine, IDS[:1]))
        tensor_map[PAST] = tensor_from_numpy(np.zeros((1, 1, 3, 4), np.float32))
        tensor_map["attention_mask"] = tensor_from_numpy(np.ones((1, 4), np.int64))
        engine.execute(tensor_map)
    assert trt.profiles == [DECODE]


def test_an_address_refused_after_its_shape_was_set_is_not_taken_for_bound(
    plain: TensorRTEngine, trt: FakeTensorRT
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
        assert close(logits_of(engine, tensor_map), FIRST)
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
        pytest.raises(BackendError, match=r"logits has shape \[1, -1, 11\]; .*\[1, 5, 11\]"),
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


REAL_KINDS = {"IRuntimeConfigOfRTX": "IRuntimeConfig", "ContextOfRTX": "IExecutionContext"}


@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="needs tensorrt-rtx")
def test_the_fake_strategies_and_properties_are_the_real_ones() -> None:
    real = importlib.import_module("tensorrt_rtx")

    for ours, theirs in (
        (fake_tensorrt.AllocationStrategy, real.ExecutionContextAllocationStrategy),
        (
            fake_tensorrt.SpecializationStrategy,
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

    ours = list(inspect.signature(getattr(getattr(fake_tensorrt, kind), method)).parameters)
    theirs = signature_of(getattr(getattr(real, REAL_KINDS.get(kind, kind)), method))

    assert any(ours == names[: len(ours)] for names in theirs), theirs


# The LoRA plugin, whose failures TensorRT does not report.


def test_a_failure_of_the_plugin_fails_the_run_and_no_graph_is_kept_of_it(
    trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    plugins = SimpleNamespace(failures=PluginFailures())
    monkeypatch.setattr(
        "trt_lora.runtime.engines.tensorrt.plan.register_plugins", lambda module: plugins
    )
    manifest = replace(small_manifest(), lora_plugin="plugin")
    with TensorRTEngine(engine_directory(tmp_path / "engine"), manifest) as engine:
        tensor_map = bound_prompt(engine)
        expected = logits_of(engine, tensor_map)
        trt.call_plugin = lambda: [plugins.failures.note("LoraAdd1: no kernel") for _ in range(2)]
        for _ in range(2):  # the second time it comes, a run is captured
            with pytest.raises(BackendError, match=r"plugin failed: LoraAdd1: no kernel$"):
                engine.execute(tensor_map)
        trt.call_plugin = lambda: None
        cuda.calls.clear()
        assert np.array_equal(logits_of(engine, tensor_map), expected)
        assert "cudaGraphLaunch" not in cuda.names()


def test_a_plan_whose_plugin_cannot_be_made_is_refused_with_its_reason(
    trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = SimpleNamespace(failures=PluginFailures())
    monkeypatch.setattr(
        "trt_lora.runtime.engines.tensorrt.plan.register_plugins", lambda module: plugins
    )
    trt.call_plugin = lambda: plugins.failures.note("LoraAdd1: another release")
    trt.refusals.add("deserialize_cuda_engine")
    manifest = replace(small_manifest(), lora_plugin="plugin")
    with (
        pytest.raises(BackendError, match=r"plugin failed: LoraAdd1: another release$"),
        TensorRTEngine(engine_directory(tmp_path / "engine"), manifest),
    ):
        pass
