"""What steps and requests took, as the engine's own thread has measured it."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from support.fakes.slot_engine import SlotEngine
from support.schedulers import scheduler_of

from trt_lora.runtime.generation.decoding.rows import RowCounts
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.server.engine_process.step_meter import SECONDS, StepMeter
from trt_lora.runtime.server.engine_process.wire import RequestTimes
from trt_lora.runtime.serving.scheduler import Scheduler

LONG = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class Clock:
    """Seconds, as a test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = scheduler_of(SlotEngine(slots=1), max_num_batched_tokens=4)
    yield made
    made.check_integrity()


def added(scheduler: Scheduler, meter: StepMeter, prompt: list[int]) -> Sequence:
    """A request that the meter knows, and the scheduler."""
    (request,) = scheduler.requests(prompt, LONG)
    meter.add([request])
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, meter: StepMeter, seconds: float) -> None:
    """Make a step as `EngineLoop` does."""

    def deliver(answers: StepAnswers) -> None:
        meter.times(answers)

    deliver(scheduler.step(deliver))
    meter.step(seconds)


def test_a_step_is_of_the_kind_of_what_it_has_run(scheduler: Scheduler) -> None:
    meter = StepMeter(scheduler.counts)
    step(scheduler, meter, 0.2)  # nothing waits
    added(scheduler, meter, [1, 2, 3, 4, 5, 6])
    for seconds in (0.2, 0.2, 0.002):  # the prompt in two chunks, one token
        step(scheduler, meter, seconds)
    added(scheduler, meter, [7, 8])
    step(scheduler, meter, 0.03)
    while scheduler:
        step(scheduler, meter, 0.002)
    values = meter.values()
    made = {kind: counts for kind, (counts, _) in values["steps"].items()}
    found = {kind: {SECONDS[i]: n for i, n in enumerate(made[kind]) if n} for kind in made}
    assert found == {"prefill": {0.2: 2}, "mixed": {0.03: 1}, "decode": {0.002: 6}}
    assert values["steps"]["prefill"][1] == pytest.approx(0.4)
    assert sum(values["step_tokens"][0]) == 9
    # 8 of prompts and 12 of answers, each in one step.
    assert (values["step_tokens"][1], values["given"], values["asked"]) == (20, 12, 8)
    assert sum(values["gaps"][0]) == 2 * (LONG.max_tokens or 0) - 2


def token(number: int, reason: str | None = None) -> StepAnswers:
    return StepAnswers({number: Token(number, 5, reason)}, {})  # type: ignore[arg-type]


def test_a_request_is_timed_once_at_its_first_token_and_once_at_its_end(
    scheduler: Scheduler,
) -> None:
    clock = Clock()
    meter = StepMeter(RowCounts(), clock)
    (request,) = scheduler.requests([1], LONG)
    number = request.id
    request.arrived_at, request.ready_at, request.joined_at = 90.0, 93.0, 95.0
    request.answered_by, request.cached_tokens = 7, 2
    meter.add([request])
    assert meter.times(token(number)) == {number: RequestTimes(7, 2, 5.0, 3.0, 5.0, 0.0)}
    for clock.now in (100.25, 101.0):
        assert meter.times(token(number)) == {}
    clock.now = 103.0
    assert meter.times(token(number, "length")) == {number: RequestTimes(7, 2, 5.0, 3.0, 5.0, 3.0)}
    counts, total = meter.values()["gaps"]
    assert {b: n for b, n in zip(SECONDS, counts, strict=False) if n} == {0.3: 1, 0.75: 1, 2.5: 1}
    assert total == pytest.approx(3.0)
    assert meter.times(token(number)) == {}  # it is forgotten


def test_what_fails_is_timed_and_what_is_cancelled_is_not(scheduler: Scheduler) -> None:
    clock = Clock()
    meter = StepMeter(RowCounts(), clock)
    waiting, gone = (scheduler.requests([1], LONG)[0] for _ in range(2))
    waiting.arrived_at = gone.arrived_at = 98.0
    meter.add([waiting, gone])
    meter.drop(gone.id)
    failed = StepAnswers({}, dict.fromkeys((waiting.id, gone.id), ValueError()))
    assert meter.times(failed) == {waiting.id: RequestTimes(None, 0, 2.0, 0.0, 0.0, 0.0)}
    assert meter.times(token(gone.id)) == meter.times(token(waiting.id)) == {}


def test_what_warmed_the_engine_up_is_not_counted(scheduler: Scheduler) -> None:
    meter = StepMeter(scheduler.counts)
    added(scheduler, meter, [1, 2])
    while scheduler:
        step(scheduler, meter, 1.0)
    meter.restart()
    assert meter.values() == StepMeter(scheduler.counts).values()
    assert meter.values()["given"] == meter.values()["asked"] == 0


def test_prefixes_that_are_shared_and_rows_that_are_lost_are_counted(scheduler: Scheduler) -> None:
    meter = StepMeter(scheduler.counts)
    prompt = list(range(12))
    first = added(scheduler, meter, prompt)
    for _ in range(3):
        step(scheduler, meter, 1.0)
    added(scheduler, meter, prompt)
    scheduler.preempt(first.id)
    while scheduler:
        step(scheduler, meter, 1.0)
    values = meter.values()
    assert values["preempted"] == 1
    assert 0 < values["shared"] <= values["asked"]


def test_the_bounds_ascend() -> None:
    assert all(a < b for a, b in pairwise(SECONDS))
