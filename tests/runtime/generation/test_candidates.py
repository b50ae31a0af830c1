"""Ranked tokens and what is drawn from them, against a sort and sums of the whole vocabulary.

The sums of the reference have 64 bits of mantissa (`longdouble`). Where a draw lies on the border
of two tokens, or a sum on p, both neighbours are right.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_lora.runtime.generation.candidates import Candidates, ranked, total
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import UNDECIDED, Logits, choose, draw

BORDER = 1e-12


def ranking(logits: Logits) -> list[int]:
    """All tokens, the greatest logit first, of equal ones the lower id first."""
    return sorted(range(logits.size), key=lambda token: (-float(logits[token]), token))


def right_tokens(logits: Logits, sampling: SamplingParams, number: float) -> set[int]:
    """The tokens that the definition allows for a draw: one, or the two of a border."""
    order = ranking(logits)
    if sampling.temperature == 0:
        return {order[0]}
    scores = logits[order].astype(np.longdouble)
    weights = np.exp((scores - scores[0]) / np.longdouble(sampling.temperature))
    counts = {int((weights >= sampling.min_p * (1 + side)).sum()) for side in (-BORDER, BORDER)}
    kept = [order[: max(count, 1)][: sampling.top_k or None] for count in counts]
    return set().union(
        *(drawn_tokens(some, weights[: len(some)], sampling, number) for some in kept)
    )


def drawn_tokens(
    order: list[int],
    weights: npt.NDArray[np.longdouble],
    sampling: SamplingParams,
    number: float,
) -> set[int]:
    """The same of what min-p and top-k have kept."""
    mass = np.concatenate([[0], np.cumsum(weights)]) / weights.sum()
    right: set[int] = set()
    for kept in range(1, len(order) + 1):
        if mass[kept - 1] >= sampling.top_p + BORDER:
            break
        if kept < len(order) and mass[kept] < sampling.top_p - BORDER:
            continue
        part = number * mass[kept]
        inside = (mass[:kept] <= part + BORDER) & (part - BORDER <= mass[1 : kept + 1])
        right |= {order[i] for i in np.flatnonzero(inside)}
    return right


@st.composite
def rows_of_logits(draw_value: st.DrawFn) -> Logits:
    """Few or many tokens: many of them equal, all equal, far apart, or some impossible."""
    vocabulary = draw_value(st.sampled_from([1, 2, 5, 37, 255, 256, 257, 700, 2049, 3000]))
    rng = np.random.default_rng(draw_value(st.integers(0, 2**32 - 1)))
    scale = draw_value(st.sampled_from([0.0, 0.5, 3.0, 1e4, 1e38]))
    steps = draw_value(st.sampled_from([1, 4, 2**10]))
    values = rng.integers(-steps, steps + 1, vocabulary) * (scale / steps)
    if draw_value(st.booleans()):
        values[rng.random(vocabulary) < 0.3] = -np.inf
        values[rng.integers(vocabulary)] = 0
    values[values == 0] *= rng.choice([1, -1], (values == 0).sum())  # zeros of both signs are equal
    return values.astype(np.float32)


PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 0.05, 0.7, 1.0, 3.0, 1e6]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 256, 257, 2500]),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-12, 0.3, 0.9, 0.999]), st.floats(0.01, 1)),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
)
NUMBERS = st.one_of(
    st.sampled_from([0.0, 0.5, 1 - 2**-53]),
    st.floats(0, 1, exclude_max=True, allow_subnormal=False),
)


@settings(max_examples=400, deadline=None)
@given(rows_of_logits(), PARAMETERS, NUMBERS)
def test_the_chosen_token_is_the_one_of_the_definition(
    logits: Logits, sampling: SamplingParams, number: float
) -> None:
    (token,) = choose(logits[None], [sampling], np.array([number]))
    assert token in right_tokens(logits, sampling, number)
    assert logits[token] > -np.inf


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(PARAMETERS, NUMBERS), min_size=1, max_size=6), st.integers(0, 99))
def test_rows_with_parameters_of_their_own_are_chosen_as_if_alone(
    rows: list[tuple[SamplingParams, float]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1 + seed % 4, (len(rows), 2100)).round(1).astype(np.float32)
    sampling, draws = [params for params, _ in rows], np.array([number for _, number in rows])
    alone = [
        choose(logits[[i]], sampling[i : i + 1], draws[[i]])[0].item() for i in range(len(rows))
    ]
    assert choose(logits, sampling, draws).tolist() == alone


@settings(max_examples=300, deadline=None)
@given(rows_of_logits(), PARAMETERS, NUMBERS, st.sampled_from([1, 3, 256]))
def test_a_few_candidates_decide_the_token_of_the_definition_or_none(
    logits: Logits, sampling: SamplingParams, number: float, count: int
) -> None:
    """As a GPU gives them: as many for each row, behind the last token none, and the total."""
    tokens, values = np.full((1, count), -1, np.int32), np.full((1, count), -np.inf, np.float32)
    best = ranked(logits, count)
    tokens[0, : best.size], values[0, : best.size] = best, logits[best]
    totals = np.array([total(logits, sampling.temperature or 1)])
    candidates = Candidates(tokens, values, totals, logits.size)
    (token,) = draw(candidates, [sampling], np.array([number]))
    enough = sampling.temperature == 0 or 0 < sampling.top_k <= count or logits.size <= count
    assert token in right_tokens(logits, sampling, number) or (token == UNDECIDED and not enough)


def test_candidates_decide_as_soon_as_they_reach_p_or_the_draw() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]])).astype(np.float32)
    candidates = Candidates(
        np.array([[0, 1]]), logits[:, :2], np.array([total(logits[0], 1)]), logits.size
    )

    def decided(number: float, top_p: float, top_k: int = 0) -> int:
        sampling = SamplingParams(temperature=1, top_p=top_p, top_k=top_k)
        return int(draw(candidates, [sampling], np.array([number]))[0])

    assert [decided(number, 1) for number in (0.39, 0.41, 0.69)] == [0, 1, 1]
    assert decided(0.71, 1) == UNDECIDED
    assert [decided(0.99, top_p) for top_p in (0.39, 0.41, 0.69)] == [0, 1, 1]
    assert decided(0.01, 0.71) == UNDECIDED  # of how much it is a part is not known
    assert decided(0.99, 1, top_k=2) == decided(0.99, 0.9, top_k=2) == 1
    assert decided(0.01, 1, top_k=3) == UNDECIDED


@settings(max_examples=200, deadline=None)
@given(rows_of_logits(), st.sampled_from([1, 2, 256, 2500, 9999]))
def test_tokens_are_ranked_by_logit_and_then_by_id(logits: Logits, count: int) -> None:
    assert ranked(logits, count).tolist() == ranking(logits)[:count]


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    logits = np.zeros((1000, 600), np.float32)
    logits[:, 500] = 1e-3
    draws = np.random.default_rng(0).random(1000)
    tokens = choose(logits, [SamplingParams(temperature=1, top_k=4)] * 1000, draws)
    assert set(tokens.tolist()) == {500, 0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 50.0])
def test_the_total_is_the_exact_sum(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 4, 5000).astype(np.float32)
    exact = np.exp((logits.astype(np.longdouble) - logits.max()) / np.longdouble(temperature)).sum()
    assert abs(total(logits, temperature) / exact - 1) < 1e-13


def share_of(tokens: npt.NDArray[np.int64], vocabulary: int) -> npt.NDArray[np.float64]:
    return np.bincount(tokens, minlength=vocabulary) / tokens.size


def test_tokens_behind_the_first_candidates_are_drawn_as_often_as_they_should() -> None:
    """Evenly spaced draws, so that each share is exact to one part of them."""
    logits = np.random.default_rng(3).normal(0, 0.5, 400).astype(np.float32)
    draws = (np.arange(4000) + 0.5) / 4000
    sampling = [SamplingParams(temperature=1.0)] * 4000
    tokens = choose(np.broadcast_to(logits, (4000, 400)), sampling, draws)
    weights = np.exp(logits.astype(np.float64))
    assert abs(share_of(tokens, 400) - weights / weights.sum()).max() <= 1 / 4000
