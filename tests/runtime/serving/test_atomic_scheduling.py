"""A scheduler whose step was ended goes on with every request as it was, or says that it cannot."""

import sys
from pathlib import Path

import pytest
from support.fakes.slot_engine import FailsOnce, SlotEngine, expected_answer, number_file
from support.interrupts import InterruptAtLine, InterruptedAnywhereError

from trt_lora.plugins.errors import BackendError, StateError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.serving.scheduler import Scheduler

FOLDERS = ("runtime/serving", "runtime/generation")
LONG = SamplingParams(max_tokens=9, temperature=0.8, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
REQUESTS = [([4, 5], 1, SHORT), ([9], 0, LONG), ([4, 5, 6], 2, LONG), ([7], 1, LONG)]


class Served:
    """A scheduler of two rows, so that requests wait, and what it has given."""

    def __init__(self, folder: Path, engine: SlotEngine | None = None) -> None:
        self.engine = engine or SlotEngine(slots=2)
        adapters = SlotAdapters(self.engine)
        for number in (1, 2):
            adapters.load_weights(str(number), number_file(folder, number))
            adapters.activate(str(number))
        self.scheduler = Scheduler(self.engine, adapters, rows=2, prefill_chunk=2)
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
            self.given[request].append(token.token_id)

    def finish(self) -> None:
        while self.scheduler:
            self.step()
        self.scheduler.check_integrity()
        expected = [expected_answer(*request) for request in REQUESTS]
        assert list(self.given.values()) == expected


@pytest.mark.slow
def test_after_an_interrupt_at_any_line_answers_are_right_or_the_scheduler_says_why_not(
    tmp_path: Path,
) -> None:
    counter = InterruptAtLine(sys.maxsize, *FOLDERS)
    served = Served(tmp_path)
    with counter:
        served.scheduler.step()
    torn, right = list[StateError](), 0
    for at in range(0, counter.seen, 3):
        served = Served(tmp_path)
        with pytest.raises(InterruptedAnywhereError), InterruptAtLine(at, *FOLDERS) as interrupt:
            served.scheduler.step()
        if interrupt.code == "return answers":  # the caller is given them at this moment
            continue
        try:
            served.finish()
        except StateError as error:
            torn.append(error)
        else:
            right += 1
    assert right > len(torn) > 0
    assert all("interrupted while requests changed places" in str(error) for error in torn)


@pytest.mark.parametrize("at", range(4, 12))
def test_after_a_run_that_failed_every_request_is_answered_as_before(
    tmp_path: Path, at: int
) -> None:
    served = Served(tmp_path, FailsOnce(at, slots=2))
    with pytest.raises(BackendError, match="lost for a moment"):
        served.finish()
    served.finish()
