"""What comes while a step is ahead: rows, adapters, other runs, failures; on a fake GPU."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import KEY, VOCABULARY
from support.models.static_batches import (
    PROMPTS,
    answers_of,
    check_cache,
    drain,
    greedy,
    is_ahead,
    keep,
    rows_of,
)
from support.models.tiny_model_runs import FIRST, SECOND, expected_answer, manager_of
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import BackendError, StateError
from trt_lora.runtime import TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.tensorrt.mirrored_block import MirroredBlock
from trt_lora.runtime.generation.decoding.step_runs import StepRuns
from trt_lora.runtime.memory.cuda import Event
from trt_lora.runtime.serving.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("hurrying")

MakeEngine = Callable[..., TensorRTEngine]


def interrupt_once(wait: Callable[[Event], None]) -> Callable[[Event], None]:
    """Return a wait at which, the first time, somebody presses Ctrl-C."""
    interrupts = [KeyboardInterrupt()]

    def interrupted(event: Event) -> None:
        if interrupts:
            raise interrupts.pop()
        wait(event)

    return interrupted


def answers_after(steps: int, batch: Scheduler) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    for _ in range(steps):
        keep(step_of(batch), answers)
    return answers


@pytest.fixture
def runs_are_finalized_last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the collector come to a run behind its block: to the oldest first, then the youngest."""
    original = MirroredBlock.__init__

    def younger_than_its_run(self: MirroredBlock, *args: Any, **how: Any) -> None:
        gc.collect(0)
        original(self, *args, **how)

    monkeypatch.setattr(MirroredBlock, "__init__", younger_than_its_run)
    gc.disable()
    yield
    gc.enable()


# What comes between.


def test_a_stop_token_is_seen_one_step_late_and_never_returned(static_engine: MakeEngine) -> None:
    expected = [expected_answer(prompt, 9) for prompt in PROMPTS]
    for stopping in range(4):
        stop = next(token for token in expected[stopping] if token != expected[stopping][0])
        kept = expected[stopping][: expected[stopping].index(stop)]
        with static_engine() as engine:
            batch = scheduler_of(engine, rows=4)
            for row, prompt in enumerate(PROMPTS):
                stops = [stop] if row == stopping else []
                batch.submit(prompt, replace(greedy(9), stop_token_ids=stops))
            found: dict[int, list[int]] = {}
            while batch:
                keep(step_of(batch), found)
                check_cache(batch, found)
        assert found == {
            row: kept if row == stopping else answer for row, answer in enumerate(expected)
        }


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_a_row_that_leaves_while_a_step_is_ahead_changes_no_other(
    static_engine: MakeEngine, leaving: int
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=3)
        for prompt in PROMPTS[:3]:
            batch.submit(prompt, greedy(9))
        answers = answers_after(4, batch)
        assert is_ahead(batch)
        batch.cancel(leaving)
        batch.submit(PROMPTS[3], greedy(9))  # into the row that is free
        while batch:
            check_cache(batch, answers)
            keep(step_of(batch), answers)

    expected = {row: expected_answer(prompt, 9) for row, prompt in enumerate(PROMPTS)}
    expected[leaving] = expected[leaving][:4]
    assert answers == expected


def test_a_row_that_joins_while_a_step_is_ahead_is_run_with_the_next(
    static_engine: MakeEngine,
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=4)
        answers: dict[int, list[int]] = {}
        for prompt in PROMPTS:
            batch.submit(prompt, greedy(9))
            keep(step_of(batch), answers)
            assert not is_ahead(batch)  # a prompt was waiting
            keep(step_of(batch), answers)
            assert is_ahead(batch)
            check_cache(batch, answers)
        while batch:
            keep(step_of(batch), answers)
            check_cache(batch, answers)
    assert answers == {row: expected_answer(prompt, 9) for row, prompt in enumerate(PROMPTS)}


def test_a_step_begun_with_other_tokens_than_are_asked_for_is_made_anew(
    static_engine: MakeEngine,
) -> None:
    answer = expected_answer(PROMPTS[0], 1)
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(9))
        rows = rows_of(batch)
        step_of(batch)
        (sequence,) = rows.sequences
        (found,) = rows.decode()
        second = int(found.topk.first()[0])
        assert is_ahead(batch)
        token = (second + 1) % VOCABULARY
        sequence.pending = [token]
        (found,) = rows.decode()
        ids = [*PROMPTS[0], answer[0], token]
        assert found.topk.first().tolist() == expected_answer(ids, 1)
        assert rows.cache.lengths.tolist() == [len(ids)]


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_of_several_adapters_each_has_a_run_and_the_last_of_them_runs_ahead(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    monkeypatch.setattr(StepRuns, "overlap", runs_ahead)
    weights: dict[str | None, Any] = {"a": FIRST, None: {}, "b": SECOND}
    lengths = {"a": 3, None: 5, "b": 12}
    with static_engine() as engine:
        store = manager_of(engine, a=FIRST, b=SECOND).store
        batch = scheduler_of(engine, store)
        rows = {n: batch.submit(PROMPTS[0], greedy(lengths[n]), adapter=n) for n in weights}
        also = batch.submit(PROMPTS[1], greedy(11), adapter="b")
        answers: dict[int, list[int]] = {}
        ahead = set()
        while batch:
            keep(step_of(batch), answers)
            ahead.add((batch.running, is_ahead(batch)))
        del batch
    for name, row in rows.items():
        assert answers[row] == expected_answer(PROMPTS[0], lengths[name], weights[name])
    assert answers[also] == expected_answer(PROMPTS[1], 11, SECOND)
    assert ((2, True) in ahead) == runs_ahead
    assert not {(4, True), (3, True)} & ahead


def test_an_adapter_that_goes_while_a_step_is_ahead_is_let_go_of_after_it(
    static_engine: MakeEngine,
) -> None:
    with static_engine() as engine:
        manager = manager_of(engine, b=SECOND)
        store = manager.store
        assert store is not None
        manager.add_weights("a", FIRST)
        memory = weakref.ref(store.bindings.rows(["a"])[next(iter(FIRST))].owner)
        batch = scheduler_of(engine, store, rows=1)
        row = batch.submit(PROMPTS[0], greedy(12), adapter="a")
        answers = answers_after(3, batch)
        assert is_ahead(batch)
        store.unload("a")
        drain(batch, answers)
        assert answers[row] == expected_answer(PROMPTS[0], 12, FIRST)
        assert store.stats.leased == 0
        del batch
        assert memory() is None


def test_a_batch_that_is_forgotten_waits_for_its_step_ahead(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(12))
        answers_after(3, batch)
        assert cuda.hurries or cuda.pending_works() > 0
        del batch
        assert cuda.pending_works() == 0
    assert not cuda.violations


@pytest.mark.usefixtures("runs_are_finalized_last")
def test_a_batch_in_a_cycle_is_collected_behind_its_step_ahead(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(12))
        step_of(batch)
        gc.collect()  # the cache is older than what is made from here on
        for _ in range(2):
            step_of(batch)
        cycle: list[object] = [batch]
        cycle.append(cycle)
        before = len(cuda.live_blocks())
        del batch, cycle
        assert len(cuda.live_blocks()) == before
        gc.collect()
        assert len(cuda.live_blocks()) < before
    assert not cuda.violations


def test_an_engine_that_is_closed_waits_for_the_step_ahead(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(12))
        answers_after(3, batch)
        assert cuda.hurries or cuda.pending_works() > 0
    assert cuda.pending_works() == 0
    with pytest.raises(StateError, match="the engine is closed"):
        step_of(batch)
    batch.cancel(0)
    del batch


@pytest.mark.parametrize("max_graphs", [0, 1, 32])
def test_other_runs_on_the_engine_come_between_two_steps(
    static_engine: MakeEngine, max_graphs: int
) -> None:
    with static_engine(max_graphs=max_graphs) as engine:
        batches = [scheduler_of(engine, rows=1) for _ in range(2)]
        answers: list[dict[int, list[int]]] = [{}, {}]
        batches[0].submit(PROMPTS[0], greedy(9))
        for _ in range(3):
            keep(step_of(batches[0]), answers[0])
        batches[1].submit(PROMPTS[1], greedy(9))
        while any(batches):
            for batch, found in zip(batches, answers, strict=True):
                keep(step_of(batch), found)
        batches.clear()
    assert answers == [{0: expected_answer(prompt, 9)} for prompt in PROMPTS[:2]]


# Failures.


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_row_without_numbers_is_named_and_the_others_go_on(
    static_engine: MakeEngine, cuda: FakeCuda, steps: int, joins: bool
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=4)
        for prompt in PROMPTS[:3]:
            batch.submit(prompt, greedy(9))
        answers = answers_after(steps, batch)
        if joins:
            batch.submit(PROMPTS[3], greedy(9))
        place = rows_of(batch).cache.views(1, 1)[KEY]
        cuda.view(place.pointer, place.nbytes)[:16].fill(0xFF)
        failed: dict[int, BaseException] = {}
        while batch:
            step = batch.step()
            keep(list(step.tokens.values()), answers)
            failed |= step.failed
            if failed:
                check_cache(batch, answers)
        found = len(answers[1])
        assert found <= steps + 1  # the step ahead may have read the row before
        assert failed.keys() == {1}
        assert "prompt 1 are NaN or infinite with no adapter" in str(failed[1])
    others = [0, 2, 3] if joins else [0, 2]
    assert answers.pop(1) == expected_answer(PROMPTS[1], found)
    assert answers == {row: expected_answer(PROMPTS[row], 9) for row in others}


def test_a_failure_of_the_step_ahead_is_raised_where_its_tokens_are_asked_for(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(9))
        answers = answers_after(3, batch)
        cuda.fail("cudaGraphLaunch", Status.cudaErrorInvalidValue)
        keep(step_of(batch), answers)
        length = rows_of(batch).cache.lengths[0]
        with pytest.raises(BackendError, match=r"of 1 rows that was begun ahead: .*invalid"):
            step_of(batch)
        assert rows_of(batch).cache.lengths[0] == length
        drain(batch, answers)
    assert answers == {0: expected_answer(PROMPTS[0], 9)}


def test_a_plugin_that_fails_in_the_step_ahead_is_told_with_its_tokens(
    static_engine: MakeEngine, trt: FakeTensorRT
) -> None:
    def fail() -> None:
        raise BackendError("the LoRA plugin failed: no workspace")

    with static_engine(max_graphs=0) as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(9))
        answers = answers_after(2, batch)
        trt.call_plugin = fail
        keep(step_of(batch), answers)
        trt.call_plugin = lambda: None
        with pytest.raises(BackendError, match=r"begun ahead: the LoRA plugin failed: no work"):
            step_of(batch)
        drain(batch, answers)
    assert answers == {0: expected_answer(PROMPTS[0], 9)}


def test_a_failure_that_nobody_asks_for_is_forgotten_with_its_sequence(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(9))
        answers_after(3, batch)
        cuda.fail("cudaGraphLaunch", Status.cudaErrorInvalidValue)
        step_of(batch)
        batch.cancel(0)
        batch.submit(PROMPTS[1], greedy(3))
        assert answers_of(batch) == {1: expected_answer(PROMPTS[1], 3)}


def test_a_wait_that_is_interrupted_loses_no_token(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=2)
        for prompt in PROMPTS[:2]:
            batch.submit(prompt, greedy(9))
        answers = answers_after(4, batch)
        with monkeypatch.context() as patch:
            patch.setattr(Event, "wait", interrupt_once(Event.wait))
            with pytest.raises(KeyboardInterrupt):
                step_of(batch)
        while batch:
            check_cache(batch, answers)
            keep(step_of(batch), answers)
    assert answers == {row: expected_answer(PROMPTS[row], 9) for row in (0, 1)}


def test_a_run_that_is_fed_follows_one_and_any_other_none(static_engine: MakeEngine) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(9))
        answers_after(3, batch)
        steps = rows_of(batch)._decoder.steps
        run = steps._runs._made[-1].run
        with pytest.raises(StateError, match="1 runs are under way, not 0; ask for results"):
            run.enqueue()
        with pytest.raises(StateError, match="1 runs are under way, not 0; ask for results"):
            run.bind(TensorMap())
        run.enqueue(is_fed=True)
        with pytest.raises(StateError, match="2 runs are under way, not 1"):
            run.enqueue(is_fed=True)
        run.discard()
        with pytest.raises(StateError, match="no run is under way"):
            run.result()
        assert np.isfinite(run.inputs["temperatures"]).all()
        steps.drop()
