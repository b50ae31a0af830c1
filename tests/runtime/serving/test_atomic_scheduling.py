"""A scheduler whose step was ended goes on with every request as it was, or says that it cannot."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.fakes.slot_engine import FailsOnce, SlotEngine, expected_answer, number_file
from support.interrupts import InterruptAtLine, InterruptedAnywhereError
from support.schedulers import scheduler_of

from trt_lora.plugins.errors import BackendError, StateError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.store.store import AdapterStore

FOLDERS = ("runtime/serving", "runtime/generation")
LONG = SamplingParams(max_tokens=9, temperature=0.8, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
REQUESTS = [([4, 5], 1, SHORT), ([9], 0, LONG), ([4, 5, 6], 2, LONG), ([7], 1, LONG)]


class Served:
    """A scheduler of two rows, so that requests wait, and what it has given."""

    def __init__(self, folder: Path, engine: SlotEngine | None = None) -> None:
        self.engine = engine or SlotEngine(slots=2)
        self.adapters = AdapterStore(self.engine)
        for number in (1, 2):
            self.adapters.load(str(number), number_file(folder, number))
            self.adapters.bindings.activate(str(number))
        self.scheduler = scheduler_of(self.engine, self.adapters, rows=2, max_num_batched_tokens=2)
        self.given: dict[int, list[int | None]] = {}
        for prompt, number, sampling in REQUESTS:
            name = str(number) if number else None
            self.given[self.scheduler.submit(prompt, sampling, adapter=name)] = []
        for _ in range(2):
            self.step()

    def step(self) -> None:
        answers = self.scheduler.step()
        assert not answers.failed
        for request, token in answers.tokens.items():
            self.given.setdefault(request, []).append(token.token_id)

    def finish(self, *, but: int | None = None) -> None:
        """Run to the end; the answer of one request may be cut short."""
        while self.scheduler:
            self.step()
        self.scheduler.check_integrity()
        for number, request in enumerate(REQUESTS):
            answer, expected = self.given[number], expected_answer(*request)
            assert answer == (expected[: len(answer)] if number == but else expected)
        assert self.adapters.stats.leased == 0


def submit_with_lease(served: Served) -> None:
    lease = served.adapters.lease("1")
    try:
        served.scheduler.submit([8, 9], SHORT, adapter=lease)
    except BaseException:
        if len(REQUESTS) not in served.scheduler:  # it is still the caller's, or was let go
            with suppress(StateError):
                served.adapters.release(lease)
        raise


# Everything that changes who has which row, and which request it may cut short.
CALLS: dict[str, tuple[Callable[[Served], object], int | None]] = {
    "step": (lambda served: served.scheduler.step(), None),
    "cancel who runs": (lambda served: served.scheduler.cancel(1), 1),
    "cancel who waits": (lambda served: served.scheduler.cancel(3), 3),
    "preempt": (lambda served: served.scheduler.preempt(1), None),
    "submit": (lambda served: served.scheduler.submit([8, 9], SHORT, adapter="1"), None),
    "submit with a lease": (submit_with_lease, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_after_an_interrupt_at_any_line_answers_are_right_or_the_scheduler_says_why_not(
    call: str, tmp_path: Path
) -> None:
    change, but = CALLS[call]
    counter = InterruptAtLine(sys.maxsize, *FOLDERS)
    served = Served(tmp_path)
    with counter:
        change(served)
    torn, right = list[StateError](), 0
    for at in range(0, counter.seen, 3 if call == "step" else 1):
        served = Served(tmp_path)
        with pytest.raises(InterruptedAnywhereError), InterruptAtLine(at, *FOLDERS) as interrupt:
            change(served)
        if interrupt.code == "return answers":  # the caller is given them at this moment
            continue
        try:
            served.finish(but=but)
        except StateError as error:
            torn.append(error)
            assert_another_one_answers(served)
        else:
            right += 1
    assert right > 0
    assert len(torn) > 0
    assert all("interrupted while requests changed places" in str(error) for error in torn)


def assert_another_one_answers(served: Served) -> None:
    """What the interrupted one has held is free."""
    served.adapters.check_integrity()
    assert served.adapters.stats.leased == 0
    for again in (served.scheduler.step, served.scheduler.check_integrity):
        with pytest.raises(StateError, match="make another one, and submit what has not ended"):
            again()
    another = scheduler_of(served.engine, served.adapters, rows=2)
    number = another.submit([4, 5], SHORT, adapter="2")
    tokens = [another.step().tokens[number].token_id for _ in range(2)]
    assert tokens == expected_answer([4, 5], 2, SHORT)


@pytest.mark.parametrize("at", range(4, 12))
def test_after_a_run_that_failed_every_request_is_answered_as_before(
    tmp_path: Path, at: int
) -> None:
    served = Served(tmp_path, FailsOnce(at, slots=2))
    with pytest.raises(BackendError, match="lost for a moment"):
        served.finish()
    served.finish()
