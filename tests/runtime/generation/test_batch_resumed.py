"""A sequence that was removed goes on behind its tokens as if it had not been."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes.slot_engine import POISON, SlotEngine, expected_answer, number_file
from support.steps import step_of

from trt_lora.plugins.errors import ConfigError, OutputError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.serving.scheduler import Scheduler

PROMPT = [4, 5, 6]
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture
def batch() -> Scheduler:
    engine = SlotEngine(slots=1)
    return Scheduler(engine, adapters=SlotAdapters(engine))


@pytest.mark.parametrize("sampling", [DRAWN, replace(DRAWN, temperature=0.0)])
@pytest.mark.parametrize("made", [0, 1, 5, 11])
def test_the_rest_of_an_answer_is_that_of_the_whole(
    batch: Scheduler, sampling: SamplingParams, made: int
) -> None:
    row = batch.submit(PROMPT, sampling)
    for _ in range(made):
        step_of(batch)
    tokens = batch.tokens(row)
    assert len(tokens) == made
    batch.cancel(row)
    batch.submit([*PROMPT, *tokens], sampling, answered=made)
    rest = []
    while batch:
        rest += [token.token_id for token in step_of(batch)]
    assert [*tokens, *rest] == expected_answer(PROMPT, 0, sampling)


def test_tokens_of_a_sequence_that_has_ended_are_not_there(batch: Scheduler) -> None:
    row = batch.submit(PROMPT, replace(DRAWN, max_tokens=1))
    step_of(batch)
    with pytest.raises(ConfigError, match=f"sequence {row} is not under way"):
        batch.tokens(row)


def test_an_error_names_the_sequences_whose_logits_are_no_numbers(tmp_path: Path) -> None:
    engine = SlotEngine(slots=1)
    adapters = SlotAdapters(engine)
    adapters.load_weights("bad", number_file(tmp_path, POISON))
    batch = Scheduler(engine, adapters=adapters)
    batch.submit(PROMPT, DRAWN)
    bad = batch.submit(PROMPT, DRAWN, adapter="bad")
    with pytest.raises(OutputError) as caught:
        step_of(batch)
    assert caught.value.rows == (bad,)
