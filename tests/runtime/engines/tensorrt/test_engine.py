"""`runtime/engines/tensorrt/engine.py` on a fake TensorRT and a fake CUDA runtime."""

from dataclasses import replace

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_plugins import FakePlugins
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import DECODE, KEY, MAX_RANK, MAX_TOKENS, PREFILL, UP
from support.models.tiny_model_runs import (
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
    step,
)

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime import TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.memory.cuda import call
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

NEW_CACHES = ["new_cache.0.key", "new_cache.0.value"]


# Before and outside `with`.


def test_nothing_touches_cuda_or_tensorrt_before_with(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    assert engine.input_names[:2] == ("input_ids", "lengths")
    assert engine.output_names == ("logits", *NEW_CACHES)
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
        engine.execute(tensor_map)
        tensor_map.update(engine.memory.upload(step(IDS[:1], len(IDS))))
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
        tensor_map.update(prompt(engine, ids[:4]))
        steps = [logits_of(engine, tensor_map)[-1:]]
        for length in (4, 5):
            tensor_map.update(step(ids[length : length + 1], length))
            steps.append(logits_of(engine, tensor_map))

    for taken, logits in enumerate(steps, start=4):
        assert close(logits, FIRST, ids[:taken])


def test_a_decoding_step_uploads_the_tokens_in_one_copy_and_leaves_the_cache_where_it_is(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        engine.execute(tensor_map)
        before = tensor_map[KEY].numpy().copy()
        tokens = step(IDS[:1], len(IDS), bound=MAX_TOKENS)
        tensor_map.update(tokens)
        copies = len(cuda.copies)
        outputs = engine.execute(tensor_map)

        (copy,) = cuda.copies[copies:]
        assert copy.nbytes == (len(tokens) - 1) * 256 + MAX_TOKENS  # to the end of the last one
        assert [copy.stream] == cuda.live_streams()
        assert outputs[NEW_CACHES[0]].pointer == tensor_map[KEY].pointer
        np.testing.assert_array_equal(tensor_map[KEY].numpy()[:, :, :5], before[:, :, :5])
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
        assert trt.bound == ["logits"]
        del outputs

        trt.bound.clear()
        manager.switch_weights("b")
        manager.refresh_tensor_map(tensor_map)
        assert close(logits_of(engine, tensor_map), SECOND)
        assert sorted(trt.bound) == sorted(["logits", *SECOND])


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
        engine.execute(tensor_map)
        trt.bound.clear()
        tensor_map.update(step(IDS[:1], len(IDS), bound=MAX_TOKENS))
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
    plugins = FakePlugins()

    def register_plugins(module: object) -> object:
        assert not list(trt.contexts)
        registered.append(module)
        return plugins

    monkeypatch.setattr("trt_lora.runtime.engines.tensorrt.plan.register_plugins", register_plugins)
    manifest = replace(engine.manifest, lora_plugin=lora_plugin)
    with TensorRTEngine(engine.directory, manifest):
        pass

    assert registered == ([trt] if lora_plugin == "plugin" else [])
    # Before any run: the first one is a user's.
    assert plugins.loaded == ([(manifest.dtype, False)] if lora_plugin == "plugin" else [])
