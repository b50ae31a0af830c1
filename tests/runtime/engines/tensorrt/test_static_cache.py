"""A KV cache that is written in place, on a fake TensorRT that checks the addresses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Violation
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import (
    DECODE,
    KEY,
    MAX_TOKENS,
    PREFILL,
    VALUE,
    engine_directory,
    small_manifest,
)
from support.models.tiny_model_runs import (
    FIRST,
    IDS,
    NO_ADAPTER,
    SECOND,
    bound_prompt,
    close,
    expected_answer,
    manager_of,
)
from support.models.tiny_model_runs import step as step_inputs
from support.schedulers import answers_of, scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime import SamplingParams, TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.manifest import Binding
from trt_lora.runtime.memory.tensor import tensor_from_numpy
from trt_lora.runtime.serving.scheduler import Scheduler

MakeEngine = Callable[..., TensorRTEngine]
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9]]


def tokens(count: int) -> SamplingParams:
    """Greedy, so many tokens, whatever they are."""
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)


def drain(batch: Scheduler, answers: dict[int, list[int]]) -> None:
    """Run the batch to its end."""
    while batch:
        step(batch, answers)


def step(batch: Scheduler, answers: dict[int, list[int]]) -> None:
    """Run one step and keep its tokens."""
    for token in step_of(batch):
        assert token.token_id is not None
        answers.setdefault(token.sequence_id, []).append(token.token_id)


# What a run does with the cache.


def test_a_cache_output_is_the_tensor_of_its_input(static_engine: MakeEngine) -> None:
    with static_engine() as engine:
        inputs = bound_prompt(engine)
        outputs = engine.execute(inputs)

        assert tuple(outputs) == engine.output_names
        for name in (KEY, VALUE):
            assert outputs[f"new_{name}"] is inputs[name]
            assert inputs[name].numpy()[0, 0, : len(IDS)].any(axis=-1).all()
        assert close(outputs["logits"].numpy(), NO_ADAPTER)


def test_a_run_allocates_its_logits_alone(static_engine: MakeEngine, cuda: FakeCuda) -> None:
    with static_engine(max_graphs=0) as engine:
        inputs = bound_prompt(engine)
        before = cuda.live_device_bytes()
        outputs = engine.execute(inputs)
        engine.memory.close()  # what was staged

        assert cuda.live_device_bytes() - before <= 256
        assert outputs["logits"].nbytes <= 256 < outputs[f"new_{KEY}"].nbytes * 2


def test_a_run_that_gave_an_output_memory_of_its_own_would_be_noticed(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    made = static_engine()
    apart = tuple(replace(output, in_place_of="") for output in made.manifest.outputs)
    engine = TensorRTEngine(made.directory, replace(made.manifest, outputs=apart))
    with engine:
        inputs = bound_prompt(engine)
        with pytest.raises(Violation, match=f"new_{KEY} is not at the address of {KEY}"):
            engine.execute(inputs)
        del inputs
    cuda.violations.clear()


def test_a_cache_on_the_host_is_refused_with_what_to_pass(static_engine: MakeEngine) -> None:
    with static_engine() as engine:
        inputs = bound_prompt(engine)
        host = {KEY: tensor_from_numpy(inputs[KEY].numpy())}
        with pytest.raises(TensorError, match=rf"{KEY} lies on the host.*memory of the engine"):
            engine.execute(TensorMap(inputs | host))
        engine.execute(TensorMap(inputs | engine.memory.upload(host)))


def test_warming_up_writes_to_no_memory_that_other_inputs_read(
    static_engine: MakeEngine, trt: FakeTensorRT
) -> None:
    seen: list[set[int]] = []

    with static_engine() as engine:
        trt.call_plugin = lambda: seen.extend(set(c._addresses.values()) for c in trt.contexts)
        engine.warm_up()

        assert trt.profiles == [DECODE, PREFILL]
    assert [len(addresses) for addresses in seen] == [4, 4]  # zeros, two caches, logits


HIDDEN = Binding("second_stream", "float32", ("batch", 512, 1, 1))


def test_an_output_that_no_step_has_gets_memory_in_every_context_and_profile(
    trt: FakeTensorRT, tmp_path: Path
) -> None:
    """The fake notes a run without an address, and memory that is too small for the batch."""
    manifest = replace(small_manifest(), second_stream=True)
    trt.manifest = replace(manifest, outputs=(*manifest.outputs, HIDDEN))
    with TensorRTEngine(engine_directory(tmp_path / "engine"), manifest) as engine:
        prompts = bound_prompt(engine)
        one = TensorMap(
            prompts | engine.memory.upload(step_inputs(IDS[:1], len(IDS), bound=MAX_TOKENS))
        )
        for _ in range(3):  # enqueued, captured, launched
            for inputs in (prompts, one):
                assert set(engine.execute(inputs)) == {"logits", f"new_{KEY}", f"new_{VALUE}"}
        assert {*trt.profiles} == {DECODE, PREFILL}


@pytest.mark.parametrize("has_output", [True, False])
def test_the_manifest_says_whether_the_plan_has_it(
    trt: FakeTensorRT, tmp_path: Path, *, has_output: bool
) -> None:
    manifest = replace(small_manifest(), second_stream=not has_output)
    trt.manifest = replace(manifest, outputs=(*manifest.outputs, *[HIDDEN][: int(has_output)]))
    engine = TensorRTEngine(engine_directory(tmp_path / "engine"), manifest)
    said = "second_stream too" if has_output else "lacks second_stream"
    with pytest.raises(BackendError, match=said):
        engine.__enter__()


# Answers.


def test_rows_of_different_lengths_have_the_answers_that_each_has_alone(
    static_engine: MakeEngine,
) -> None:
    with static_engine() as engine:
        store = manager_of(engine, a=FIRST, b=SECOND).store
        assert store is not None
        for name, weights in ((None, {}), ("a", FIRST), ("b", SECOND)):
            names = [name] * len(PROMPTS)
            completions = answers_of(engine, store, PROMPTS, names, tokens(9))
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                assert list(completion.token_ids) == expected_answer(prompt, 9, weights)


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("max_graphs", [0, 32])
def test_rows_that_join_and_leave_change_no_answer(
    static_engine: MakeEngine, max_graphs: int, chunk: int | None
) -> None:
    lengths = [9, 2, 5, 7, 4, 8]
    with static_engine(max_graphs=max_graphs) as engine:
        batch = scheduler_of(engine, rows=3, max_num_batched_tokens=chunk)
        answers: dict[int, list[int]] = {}
        prompts = [*PROMPTS, [2, 7], [1, 8, 2, 8]]
        for prompt, length in zip(prompts, lengths, strict=True):
            while len(batch) == 3:
                step(batch, answers)
            batch.submit(prompt, tokens(length))
            step(batch, answers)
        drain(batch, answers)

    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert answers[row] == expected_answer(prompt, length)
