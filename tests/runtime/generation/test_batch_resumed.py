"""A sequence that was removed goes on behind its tokens as if it had not been."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes.slot_engine import POISON, SlotEngine, expected_answer, number_file

from trt_lora.plugins.errors import ConfigError, OutputError
from trt_lora.runtime.generation.batch import Batch
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters

PROMPT = [4, 5, 6]
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture
def batch() -> Batch:
    engine = SlotEngine(slots=1)
    return Batch(engine, adapters=SlotAdapters(engine))


@pytest.mark.parametrize("sampling", [DRAWN, replace(DRAWN, temperature=0.0)])
@pytest.mark.parametrize("made", [0, 1, 5, 11])
def test_the_rest_of_an_answer_is_that_of_the_whole(
    batch: Batch, sampling: SamplingParams, made: int
) -> None:
    row = batch.add(PROMPT, sampling)
    for _ in range(made):
        batch.step()
    tokens = batch.tokens(row)
    assert len(tokens) == made
    batch.remove(row)
    batch.add([*PROMPT, *tokens], sampling, answered=made)
    rest = []
    while batch:
        rest += [token.token_id for token in batch.step()]
    assert [*tokens, *rest] == expected_answer(PROMPT, 0, sampling)


def test_tokens_of_a_sequence_that_has_ended_are_not_there(batch: Batch) -> None:
    row = batch.add(PROMPT, replace(DRAWN, max_tokens=1))
    batch.step()
    with pytest.raises(ConfigError, match=f"sequence {row} is not under way"):
        batch.tokens(row)


def test_an_error_names_the_sequences_whose_logits_are_no_numbers(tmp_path: Path) -> None:
    engine = SlotEngine(slots=1)
    adapters = SlotAdapters(engine)
    adapters.load_weights("bad", number_file(tmp_path, POISON))
    batch = Batch(engine, adapters=adapters)
    batch.add(PROMPT, DRAWN)
    bad = batch.add(PROMPT, DRAWN, adapter="bad")
    with pytest.raises(OutputError) as caught:
        batch.step()
    assert caught.value.rows == (bad,)
