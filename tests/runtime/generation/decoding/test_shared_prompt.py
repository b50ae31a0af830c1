"""Rows of one prompt: run once, copied, and none the wiser when another leaves."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes.slot_engine import POISON, SlotEngine, expected_answer, number_file
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import ConfigError, OutputError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore

PROMPT = [4, 5, 6, 7, 8]
DRAWN = SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True, n=3)
ALONE = replace(DRAWN, n=1)


class Counted(SlotEngine):
    """Counts the tokens that it runs."""

    def __init__(self) -> None:
        super().__init__(slots=2)
        self.tokens = 0

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        self.tokens += tensor_map["input_ids"].numpy().size
        return super().execute(tensor_map)


@pytest.fixture
def engine() -> Counted:
    return Counted()


@pytest.fixture
def batch(engine: Counted) -> Scheduler:
    return scheduler_of(engine, AdapterStore(engine), max_num_batched_tokens=2)


def answers_of(batch: Scheduler, rows: tuple[int, ...]) -> list[list[int | None]]:
    found: dict[int, list[int | None]] = {row: [] for row in rows}
    while batch:
        for token in step_of(batch):
            found.setdefault(token.sequence_id, []).append(token.token_id)
    return [found[row] for row in rows]


def test_a_prompt_is_run_once_for_all_its_answers(engine: Counted, batch: Scheduler) -> None:
    rows = batch.submit_all(PROMPT, DRAWN)
    while not batch.tokens(rows[0]):
        step_of(batch)
    assert engine.tokens == len(PROMPT) - 1 + len(rows)  # the last token is run in each row
    assert all(len(batch.tokens(row)) == 1 for row in rows)


def test_answers_differ_can_be_repeated_and_the_first_is_that_of_one(batch: Scheduler) -> None:
    first = answers_of(batch, batch.submit_all(PROMPT, DRAWN))
    again = answers_of(batch, batch.submit_all(PROMPT, DRAWN))
    assert first == again
    assert first[0] == expected_answer(PROMPT, 0, ALONE)
    assert len(set(map(tuple, first))) == 3
    assert first[:2] == answers_of(batch, batch.submit_all(PROMPT, replace(DRAWN, n=2)))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_one_that_leaves_changes_no_other(batch: Scheduler, steps: int, leaving: int) -> None:
    expected = answers_of(batch, batch.submit_all(PROMPT, DRAWN))
    rows = batch.submit_all(PROMPT, DRAWN)
    given = {row: list[int | None]() for row in rows}
    for _ in range(steps):
        for token in step_of(batch):
            given[token.sequence_id].append(token.token_id)
    batch.cancel(rows[leaving])
    rest = answers_of(batch, rows)
    for place, row in enumerate(rows):
        if place != leaving:
            assert given[row] + rest[place] == expected[place]


def test_all_leave_before_their_prompt_is_through(batch: Scheduler) -> None:
    rows = batch.submit_all(PROMPT, DRAWN)
    step_of(batch)
    for row in rows:
        batch.cancel(row)
    row = batch.submit(PROMPT, ALONE)
    assert answers_of(batch, (row,)) == [expected_answer(PROMPT, 0, ALONE)]


def test_answers_have_the_adapter_of_their_prompt(engine: Counted, tmp_path: Path) -> None:
    adapters = AdapterStore(engine)
    adapters.load("five", number_file(tmp_path, 5))
    batch = scheduler_of(engine, adapters)
    alone = batch.submit(PROMPT, ALONE)
    rows = batch.submit_all(PROMPT, DRAWN, adapter="five")
    found = answers_of(batch, (alone, *rows))
    assert found[0] == expected_answer(PROMPT, 0, ALONE)
    assert found[1] == expected_answer(PROMPT, 5, ALONE)
    adapters.check_integrity()


class ReplacedBetweenLeases(AdapterStore):
    """Another thread replaces the adapter behind the first lease."""

    another: Path | None = None

    def lease(self, name: str, *, expected_version: int | None = None) -> Lease:
        found = super().lease(name, expected_version=expected_version)
        if self.another is not None:
            self.load(name, self.another, replace=True)
            self.another = None
        return found


def test_answers_whose_adapter_is_replaced_between_two_of_them_share_no_prompt(
    engine: Counted, tmp_path: Path
) -> None:
    adapters = ReplacedBetweenLeases(engine)
    adapters.load("a", number_file(tmp_path, 5))
    adapters.bindings.activate("a")
    adapters.another = number_file(tmp_path, 6)
    batch = scheduler_of(engine, adapters)
    leading = replace(DRAWN, temperature=1e-9)  # every draw is the greedy token
    found = answers_of(batch, batch.submit_all(PROMPT, leading, adapter="a"))
    assert found == [expected_answer(PROMPT, n, replace(leading, n=1)) for n in (5, 6, 6)]


def test_logits_that_are_no_numbers_end_all_answers_of_a_prompt(
    engine: Counted, tmp_path: Path
) -> None:
    adapters = AdapterStore(engine)
    adapters.load("bad", number_file(tmp_path, POISON))
    batch = scheduler_of(engine, adapters)
    rows = batch.submit_all(PROMPT, DRAWN, adapter="bad")
    failed: dict[int, BaseException] = {}
    while batch:
        failed |= batch.step().failed
    assert failed.keys() == set(rows)
    assert all(isinstance(error, OutputError) for error in failed.values())


def test_answers_that_find_no_row_wait_for_one(batch: Scheduler) -> None:
    rows = [*batch.submit_all(PROMPT, DRAWN), *batch.submit_all(PROMPT, DRAWN)]
    found = answers_of(batch, tuple(rows))
    assert found[:3] == found[3:]


def test_a_sequence_by_itself_has_one_answer(batch: Scheduler) -> None:
    with pytest.raises(ConfigError, match="n is 3, and submit takes one request; call submit_all"):
        batch.submit(PROMPT, DRAWN)
