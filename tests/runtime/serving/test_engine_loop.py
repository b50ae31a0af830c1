"""A thread that owns a scheduler: every request has one end, whatever threads and devices do."""

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually
from support.fakes.slot_engine import SlotEngine, expected_answer, number_file
from support.schedulers import scheduler_of

from trt_lora.plugins.errors import BackendError, ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.token import StepAnswers
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.runtime.store.source import FileSource
from trt_lora.runtime.store.store import AdapterStore

LONG = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class FailingEngine(SlotEngine):
    """A device that fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(slots=2)
        self.failures = 0

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        if self.failures:
            self.failures -= 1
            raise BackendError("the device was lost for a moment")
        return super().execute(tensor_map)


class Served:
    """A loop on an engine with two slots, and what its requests were given."""

    def __init__(self, folder: Path) -> None:
        self.engine = FailingEngine()
        self.adapters = AdapterStore(self.engine)
        for number in (1, 2, 3):
            self.adapters.load(str(number), number_file(folder, number))
        self.scheduler = scheduler_of(self.engine, self.adapters)
        self.steps = 0
        self.tokens: dict[int, list[int | None]] = {}
        self.ends: dict[int, list[object]] = {}  # why each request has ended
        self.receive: Callable[[StepAnswers], None] = lambda answers: None
        step = self.scheduler.step

        def counted(*args: Any) -> StepAnswers:
            self.steps += 1
            return step(*args)

        self.scheduler.step = counted  # type: ignore[method-assign, assignment]
        self.loop = EngineLoop(self.scheduler, self.take)

    def take(self, answers: StepAnswers) -> None:
        for number, token in answers.tokens.items():
            assert number not in self.ends
            self.tokens.setdefault(number, []).append(token.token_id)
            if token.finish_reason is not None:
                self.ends.setdefault(number, []).append(token.finish_reason)
        for number, error in answers.failed.items():
            self.ends.setdefault(number, []).append(error)
        self.receive(answers)

    def submit(self, *args: Any, **options: Any) -> int:
        (number,) = self.loop.submit(*args, **options)
        return number


def has_ended(served: Served, request: int) -> bool:
    return request in served.ends


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.loop.close()
    made.adapters.close()
    assert "trt-lora-engine" not in [thread.name for thread in threading.enumerate()]


def test_requests_of_any_thread_are_answered_as_alone(served: Served) -> None:
    asked: dict[int, tuple[list[int], int]] = {}

    def client(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(8):
            prompt = [order.randrange(97) for _ in range(order.randrange(1, 9))]
            number = order.randrange(4)
            asked[served.submit(prompt, LONG, adapter=str(number) if number else None)] = (
                prompt,
                number,
            )

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: len(served.ends) == len(asked))
    for request, (prompt, number) in asked.items():
        assert served.tokens[request] == expected_answer(prompt, number, LONG)
        assert served.ends[request] == ["length"]


def test_what_cannot_be_answered_is_refused_in_the_callers_thread(served: Served) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        served.submit([])
    with pytest.raises(UnknownAdapterError, match="unknown adapter 'x'"):
        served.submit([4], adapter="x")


def test_it_sleeps_while_nothing_can_go_on(served: Served) -> None:
    assert eventually(lambda: served.ends.keys() == {served.submit([4], LONG)} or True)
    assert eventually(lambda: len(served.scheduler) == 0)
    time.sleep(0.05)
    before = served.steps
    time.sleep(0.3)
    assert served.steps == before


def test_a_load_that_ends_wakes_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, read = threading.Event(), FileSource.read
    monkeypatch.setattr(FileSource, "read", lambda *a: may_read.wait(60) and read(*a))
    served.adapters.register("slow", number_file(tmp_path, 9))
    request = served.submit([4], LONG, adapter="slow")
    time.sleep(0.2)
    before = served.steps
    time.sleep(0.3)
    assert served.steps == before
    may_read.set()
    assert eventually(lambda: request in served.ends)
    assert served.tokens[request] == expected_answer([4], 9, LONG)


def test_a_cancelled_request_has_no_event_more_and_can_be_cancelled_again(served: Served) -> None:
    endless = SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True)
    number = served.submit([4], endless)
    served.loop.cancel(number)
    served.loop.cancel(number)
    served.loop.cancel(99)
    other = served.submit([5], LONG)
    assert eventually(lambda: other in served.ends)
    assert number not in served.scheduler


def test_an_error_of_the_engine_ends_those_that_run_and_the_next_step_is_tried(
    served: Served,
) -> None:
    served.engine.failures = 1
    first = served.submit([4], LONG)
    assert eventually(lambda: first in served.ends)
    second = served.submit([5], LONG)
    assert eventually(lambda: second in served.ends)
    assert isinstance(served.ends[first][0], BackendError)
    assert served.tokens[second] == expected_answer([5], 0, LONG)
    assert len(served.ends[first]) == len(served.ends[second]) == 1


def test_after_three_errors_in_a_row_it_is_dead_and_says_so(served: Served) -> None:
    served.engine.failures = 1000
    requests = [served.submit([4], LONG, adapter=name) for name in ("1", "2", "3", "1", "2")]

    def is_dead() -> bool:
        try:
            requests.append(served.submit([4], LONG))
        except StateError as error:
            return "has died of: the device was lost" in str(error)
        return False

    assert eventually(is_dead)
    assert eventually(lambda: served.ends.keys() == set(requests))
    assert all(len(ends) == 1 for ends in served.ends.values())


def test_a_receiver_that_fails_costs_nobody_else_an_event(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_once(answers: StepAnswers) -> None:
        served.receive = lambda answers: None
        raise ValueError("no receiver")

    served.receive = fail_once
    number = served.submit([4], LONG)
    assert eventually(lambda: number in served.ends)
    assert served.tokens[number] == expected_answer([4], 0, LONG)
    assert "the receiver of events failed" in caplog.text


@pytest.mark.parametrize("drain_s", [0.0, 60.0])
def test_what_is_left_at_the_end_is_answered_in_time_or_ends_with_an_error(
    served: Served, drain_s: float
) -> None:
    requests = [served.submit([4, turn], LONG) for turn in range(20)]
    served.loop.close(drain_s)
    assert served.ends.keys() == set(requests)
    assert all(len(ends) == 1 for ends in served.ends.values())
    drained = [ends == ["length"] for ends in served.ends.values()]
    assert all(drained) or not drain_s
    with pytest.raises(StateError, match="is closed; make another one"):
        served.submit([4])


def test_requests_cancelled_and_failed_at_random_have_one_end_each(served: Served) -> None:
    order, asked, cancelled = random.Random(3), dict[int, tuple[list[int], int]](), set[int]()
    for turn in range(60):
        number = order.randrange(4)
        prompt = [order.randrange(97) for _ in range(order.randrange(1, 12))]
        request = served.submit(prompt, LONG, adapter=str(number) if number else None)
        asked[request] = prompt, number
        if order.random() < 0.2:
            cancelled.add(gone := order.choice(list(asked)))
            served.loop.cancel(gone)
        if turn % 12 == 11:  # never three in a row: a token comes in between
            served.engine.failures = 1
            for _ in range(2):
                last = served.submit([turn], LONG)
                asked[last] = [turn], 0
                assert eventually(partial(has_ended, served, last))
        time.sleep(order.random() * 0.003)
    assert eventually(lambda: served.ends.keys() >= asked.keys() - cancelled)
    served.loop.close(60.0)
    for request, ends in served.ends.items():
        assert len(ends) == 1
        if ends == ["length"]:
            assert served.tokens[request] == expected_answer(*asked[request], LONG)


class HoardingEngine(SlotEngine):
    """Leaves thousands of objects behind at every step, as loads in other threads do."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.hoard: list[list[object]] = []

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        self.hoard += [[] for _ in range(8000)]
        return super().execute(tensor_map)


def test_garbage_of_all_generations_is_collected_between_steps_and_once() -> None:
    engine, looked_at = HoardingEngine(), list[tuple[bool, int]]()
    scheduler, inside, done = scheduler_of(engine), [False], threading.Event()
    step = scheduler.step

    def entered(*args: Any) -> StepAnswers:
        inside[0] = True
        try:
            return step(*args)
        finally:
            inside[0] = False

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append((inside[0], len(gc.get_objects())))

    def take(answers: StepAnswers) -> None:
        if any(token.finish_reason for token in answers.tokens.values()):
            done.set()

    scheduler.step = entered  # type: ignore[method-assign, assignment]
    prompts = 4
    gc.callbacks.append(noted)
    try:
        with EngineLoop(scheduler, take) as loop:
            for _ in range(prompts):
                done.clear()
                loop.submit([4], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
                assert done.wait(60)
            frozen = gc.get_freeze_count()
    finally:
        gc.callbacks.remove(noted)
    assert gc.get_freeze_count() == 0
    assert frozen > prompts * 20 * 8000
    assert not any(is_inside for is_inside, _ in looked_at)
    # Of what is new alone, never of what all steps have left; but the first looks at everything.
    assert max(count for _, count in looked_at[1:]) < 200_000
