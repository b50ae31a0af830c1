"""Bias and penalties against float64 numpy, written by definition, and transformers."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.generation.logits.changed_logits import apply_penalties
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import choose, next_keys

pytestmark = pytest.mark.needs_torch

VOCABULARY = 23
KEYS = next_keys(np.random.default_rng(0), 4000)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)


def some_logits(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)


def by_definition(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    """Token by token, in the order of vLLM: bias; repetition, frequency and presence penalties."""
    found = []
    for token, logit in enumerate(map(float, logits)):
        value = logit + (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in answer:
            ratio = params.repetition_penalty
            value = value / ratio if value > 0 else value * ratio
        value -= params.frequency_penalty * answer.count(token)
        value -= params.presence_penalty * (token in answer)
        found.append(value)
    return found


PARAMETERS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -2.0]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-50, 50)),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 99), PARAMETERS, TOKENS, TOKENS)
def test_logits_are_those_of_the_definition_rounded_once(
    seed: int, params: SamplingParams, prompt: list[int], answer: list[int]
) -> None:
    logits = some_logits(seed)
    before = logits.copy()
    expected = np.array(by_definition(logits, params, prompt, answer), np.float32)
    np.testing.assert_array_equal(apply_penalties(logits, params, prompt, answer), expected)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("penalty", [0.4, 1.0, 1.8])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, answer = some_logits(1), [3, 4, 3], [7, 7, 9]
    theirs: Any = RepetitionPenaltyLogitsProcessor(penalty)
    expected = theirs(torch.tensor([prompt + answer]), torch.tensor(logits[None]).clone())
    found = apply_penalties(
        logits,
        SamplingParams(repetition_penalty=penalty, temperature=0),
        prompt,
        answer,
    )
    np.testing.assert_allclose(found, expected[0].numpy(), rtol=1e-6)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = some_logits(2)
    theirs: Any = MinPLogitsWarper(min_p)
    expected = theirs(torch.zeros(1, 0), torch.tensor(logits[None] / 1.5)).isfinite()[0].numpy()
    sampling = [SamplingParams(temperature=1.5, min_p=min_p)] * 4000
    tokens = choose(HostTopK(np.broadcast_to(logits, (4000, VOCABULARY))), sampling, KEYS)
    assert set(tokens.tolist()) == set(np.flatnonzero(expected).tolist())


def test_a_token_that_a_grammar_forbids_stays_forbidden() -> None:
    logits = np.full(VOCABULARY, -np.inf, np.float32)
    logits[3] = 1
    params = SamplingParams(
        logit_bias={4: 100},
        repetition_penalty=0.5,
        presence_penalty=-2,
        temperature=0,
    )
    found = apply_penalties(logits, params, [4], [4, 5])
    assert np.flatnonzero(np.isfinite(found)).tolist() == [3]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, repetition_penalty=1e-300),
        SamplingParams(temperature=0.7, repetition_penalty=5e-324),
        SamplingParams(temperature=0.7, repetition_penalty=1.7e308),
        SamplingParams(temperature=0.7, repetition_penalty=5e-324, frequency_penalty=2.0),
        SamplingParams(temperature=0.7, logit_bias={4: 3e38, 5: -3e38}, repetition_penalty=1e30),
        SamplingParams(
            temperature=1e-320,
            logit_bias=dict.fromkeys(range(23), -3.4e38),
            repetition_penalty=1e300,
        ),
    ],
)
def test_what_is_beyond_float32_stays_a_number_and_a_token_is_chosen(
    params: SamplingParams,
) -> None:
    for seed in range(5):
        found = apply_penalties(some_logits(seed), params, [4, 5, 6], [7])
        assert np.isfinite(found).all()
        (token,) = choose(HostTopK(found[None]), [params], KEYS[:1])
        assert found[token] == found.max()
