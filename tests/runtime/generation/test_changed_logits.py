"""A batch whose tokens are chosen from other logits than the engine's: by the definition."""

from pathlib import Path

import numpy as np
import pytest
from support.fakes.slot_engine import SlotEngine, _logits
from support.schedulers import scheduler_of
from support.steps import step_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.store import AdapterStore

PROMPT = [4, 5, 6]


def batch_of(tokenizer: TextTokenizer | None = None) -> Scheduler:
    engine = SlotEngine(slots=1)
    return scheduler_of(engine, AdapterStore(engine), tokenizer=tokenizer)


def tokens_of(batch: Scheduler, row: int) -> list[Token]:
    found: list[Token] = []
    while batch:
        found += [token for token in step_of(batch) if token.sequence_id == row]
    return found


def greedy_by_definition(params: SamplingParams) -> list[int]:
    """The greatest of logits to which bias and penalties were applied, in float64."""
    ids, answer = list(PROMPT), list[int]()
    while len(answer) < (params.max_tokens or 0):
        scores = _logits(sum(ids), len(ids), 0).astype(np.float64)
        for token, bias in (params.logit_bias or {}).items():
            scores[token] += bias
        for token in set(ids):
            scores[token] *= (
                1 / params.repetition_penalty if scores[token] > 0 else (params.repetition_penalty)
            )
        for token in answer:
            scores[token] -= params.frequency_penalty
        for token in set(answer):
            scores[token] -= params.presence_penalty
        answer.append(int(scores.argmax()))
        ids.append(answer[-1])
    return answer


CHANGED = [
    SamplingParams(
        max_tokens=25,
        logit_bias={3: 2.2, 50: 2.1},
        repetition_penalty=1.7,
        ignore_eos=True,
        temperature=0,
    ),
    SamplingParams(max_tokens=25, presence_penalty=1.3, ignore_eos=True, temperature=0),
    SamplingParams(max_tokens=25, frequency_penalty=-0.4, ignore_eos=True, temperature=0),
    SamplingParams(max_tokens=25, logit_bias={3: 1.1, 50: 1.2}, ignore_eos=True, temperature=0),
    SamplingParams(
        max_tokens=25,
        logit_bias={3: 2},
        frequency_penalty=0.9,
        repetition_penalty=0.7,
        ignore_eos=True,
        temperature=0,
    ),
]


@pytest.mark.parametrize("params", CHANGED)
def test_tokens_are_those_of_the_definition(params: SamplingParams) -> None:
    batch = batch_of()
    batch.submit(
        PROMPT, SamplingParams(max_tokens=25, ignore_eos=True, temperature=0)
    )  # as it is, in the row before
    row = batch.submit(PROMPT, params)
    plain = greedy_by_definition(SamplingParams(max_tokens=25, temperature=0))
    found = [token.token_id for token in tokens_of(batch, row)]
    assert found == greedy_by_definition(params)
    assert found != plain


@pytest.mark.parametrize("params", CHANGED)
def test_a_sequence_that_was_preempted_keeps_its_penalties(params: SamplingParams) -> None:
    batch = batch_of()
    row = batch.submit(PROMPT, params)
    for _ in range(5):
        step_of(batch)
    made = batch.tokens(row)
    batch.preempt(row)
    rest = [token.token_id for token in tokens_of(batch, row)]
    assert [*made, *rest] == greedy_by_definition(params)


def test_log_probabilities_are_those_of_the_engines_own_logits() -> None:
    params = SamplingParams(
        max_tokens=6, logit_bias={50: 100}, logprobs=2, ignore_eos=True, temperature=0
    )
    batch = batch_of()
    total, count = sum(PROMPT), len(PROMPT)
    for token in tokens_of(batch, batch.submit(PROMPT, params)):
        scores = _logits(total, count, 0).astype(np.longdouble)
        scores -= np.log(np.exp(scores).sum())
        assert token.token_id == 50
        assert token.logprobs is not None
        assert list(token.logprobs)[1:] == np.argsort(-scores, kind="stable")[:2].tolist()
        for one, known in token.logprobs.items():
            assert known.logprob == pytest.approx(float(scores[one]), abs=1e-6)
        total, count = total + 50, count + 1


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    """A letter for every byte, and nothing behind `A` to `z` in the vocabulary of the engine."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return TextTokenizer(tmp_path)


def test_a_stop_string_ends_its_sequence_alone(tokenizer: TextTokenizer) -> None:
    batch = batch_of(tokenizer)
    whole = greedy_by_definition(SamplingParams(max_tokens=8, temperature=0))
    text = tokenizer.decode(whole)
    stop = text[2:4]
    params = SamplingParams(max_tokens=8, stop=stop, ignore_eos=True, temperature=0)
    row = batch.submit(PROMPT, params)
    other = batch.submit(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0))
    found: dict[int, list[Token]] = {row: [], other: []}
    while batch:
        for token in step_of(batch):
            found[token.sequence_id].append(token)
    assert "".join(token.text for token in found[row]) == text[:2]
    assert [token.token_id for token in found[row]] == whole[:4]
    assert [token.finish_reason for token in found[row]] == [None, None, None, "stop"]
    assert "".join(token.text for token in found[other]) == text


def test_a_stop_string_across_a_preemption_is_found(tokenizer: TextTokenizer) -> None:
    batch = batch_of(tokenizer)
    whole = greedy_by_definition(SamplingParams(max_tokens=8, temperature=0))
    params = SamplingParams(
        max_tokens=8, stop=tokenizer.decode(whole[2:4]), ignore_eos=True, temperature=0
    )
    row = batch.submit(PROMPT, params)
    first = [step_of(batch)[0].text for _ in range(3)]
    batch.preempt(row)
    (last,) = tokens_of(batch, row)
    assert last.finish_reason == "stop"
    assert "".join(first) + last.text == tokenizer.decode(whole[:2])


def test_text_that_nobody_can_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no tokenizer; pass tokenizer="):
        batch_of().submit(PROMPT, SamplingParams(max_tokens=64, stop="a", temperature=0))


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit_bias holds token id 97, expected 0 to 96"):
        batch_of().submit(
            PROMPT, SamplingParams(max_tokens=64, logit_bias={97: 1.0}, temperature=0)
        )
