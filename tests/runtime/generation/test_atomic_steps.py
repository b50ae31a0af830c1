"""A step is made as a whole or not at all, wherever an exception or an interrupt ends it."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.fakes.slot_engine import POISON, FailsOnce, SlotEngine, expected_answer, number_file
from support.interrupts import InterruptAtLine, InterruptedAnywhereError
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import BackendError, OutputError, StateError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.store.store import AdapterStore

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, temperature=0.9, seed=4, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True)
# Prompt, adapter and parameters of each row: the first one ends first, so that others move.
ROWS = [([4, 5], 2, SHORT), ([9], 0, GREEDY), ([4, 5, 6], 1, DRAWN), ([*range(3, 12)], 1, GREEDY)]
FOLDER = "runtime/generation"
STEP = 2  # in which the first row ends, and a piece of the last one's prompt is run


@dataclass
class Served:
    """A batch on an engine with two slots, and what its rows were given."""

    folder: Path
    engine: SlotEngine = field(default_factory=lambda: SlotEngine(slots=3, rows=6))
    given: dict[int, list[int | None]] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = AdapterStore(self.engine)
        for number in (1, 2, POISON):
            self.adapters.load(str(number), number_file(self.folder, number))
            self.adapters.bindings.activate(str(number))  # so that every run is of the same lines
        self.batch = scheduler_of(self.engine, self.adapters, max_num_batched_tokens=2)

    def add_rows(self) -> None:
        for prompt, number, sampling in ROWS:
            row = self.batch.submit(prompt, sampling, adapter=str(number) if number else None)
            self.given[row] = []

    def step(self) -> None:
        answers = self.batch.step()
        self.failed |= answers.failed
        for token in answers.tokens.values():
            self.given[token.sequence_id].append(token.token_id)

    def step_on(self) -> None:
        """Until a step raises."""
        while True:
            self.step()

    def finish(self) -> None:
        while self.batch:
            self.step()
        self.adapters.check_integrity()
        assert not self.adapters.stats.leased

    def check_answers(self) -> None:
        expected = [expected_answer(prompt, number, params) for prompt, number, params in ROWS]
        assert list(self.given.values()) == expected


def lines_of_a_step(folder: Path) -> int:
    """How many lines the step runs."""
    served, counter = Served(folder), InterruptAtLine(sys.maxsize, FOLDER)
    served.add_rows()
    for _ in range(STEP):
        served.step()
    with counter:
        served.step()
    served.finish()
    return counter.seen


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_changes_no_answer_or_is_told(tmp_path: Path) -> None:
    count = lines_of_a_step(tmp_path)
    assert count > 150
    torn = right = 0
    for at in range(0, count, 5):  # each line is run several times
        served = Served(tmp_path)
        served.add_rows()
        for _ in range(STEP):
            served.step()
        with pytest.raises(InterruptedAnywhereError), InterruptAtLine(at, FOLDER):
            step_of(served.batch)
        if served.batch._active._is_moving:
            with pytest.raises(StateError, match="interrupted while requests changed places"):
                step_of(served.batch)
            torn += 1
            continue
        right += 1
        served.finish()
        served.check_answers()
    assert right > 2 * torn


@pytest.mark.parametrize("at", range(1, 12))
def test_a_run_that_fails_is_made_again(tmp_path: Path, at: int) -> None:
    served = Served(tmp_path, FailsOnce(at, slots=3, rows=6))
    served.add_rows()
    with pytest.raises(BackendError, match="lost for a moment"):
        served.step_on()
    served.finish()
    served.check_answers()


@pytest.mark.parametrize("rounds", range(4))
def test_rows_beside_one_without_numbers_are_given_every_token_once(
    tmp_path: Path, rounds: int
) -> None:
    served = Served(tmp_path)
    served.add_rows()
    served.batch.cancel(0)
    del served.given[0]
    for _ in range(rounds):
        served.step()
    bad = served.batch.submit([5], GREEDY, adapter=str(POISON))
    served.finish()
    assert isinstance(served.failed.pop(bad), OutputError)
    assert not served.failed
    expected = [expected_answer(prompt, number, params) for prompt, number, params in ROWS[1:]]
    assert list(served.given.values()) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=1.0, repetition_penalty=5e-324, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, repetition_penalty=1.7e308, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1e-320, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.7e308, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, logit_bias=dict.fromkeys(range(97), 3.4e38)),
    ],
)
def test_parameters_of_one_row_change_no_other_rows_answer(
    tmp_path: Path, params: SamplingParams
) -> None:
    served = Served(tmp_path)
    served.add_rows()
    for prompt in ([4], [*range(3, 20)]):
        row = served.batch.submit(prompt, params)
        served.given[row] = []
        for _ in range(3):
            served.step()
        served.batch.cancel(row)
        del served.given[row]
    served.finish()
    served.check_answers()


def test_a_row_that_may_have_no_token_fails_alone_and_is_named(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.add_rows()
    only = SamplingParams(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)
    stuck = served.batch.submit([4], only)
    served.finish()
    assert "prompt 4 cannot go on: its parameters forbid every token" in str(served.failed[stuck])
    served.check_answers()
