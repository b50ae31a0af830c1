"""The best tokens and what is drawn from them, against a sort and sums of the whole vocabulary.

The sums of the reference have 64 bits of mantissa (`longdouble`). Where two tokens arrive at almost
the same time, or a sum lies on p, both neighbours are right.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_lora.runtime.engines.host_topk import HostTopK, find_candidates, topk_ids
from trt_lora.runtime.engines.topk import NO_TOKEN, Candidates, Logits, Tokens
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.race import Keys, race_of_rest
from trt_lora.runtime.generation.sampling import NEEDS_FULL_LOGITS, choose_beyond, draw
from trt_lora.runtime.generation.sampling import choose as choose_of

BORDER = 1e-12
ROUNDING = 1e-4  # weights of a whole vocabulary are float32


def choose(logits: Logits, sampling: list[SamplingParams], keys: Keys) -> Tokens:
    return choose_of(HostTopK(logits), sampling, keys)


def best_ids(logits: Logits, count: int) -> Tokens:
    ids: Tokens = topk_ids(logits[None], count)[0]
    return ids


def total(logits: Logits, temperature: float) -> float:
    (found,) = find_candidates(logits[None], 1, [temperature]).totals
    return float(found)


def ordered(logits: Logits) -> list[int]:
    """All tokens, the greatest logit first, of equal ones the lower id first."""
    return sorted(range(logits.size), key=lambda token: (-float(logits[token]), token))


def kept_sets(logits: Logits, sampling: SamplingParams) -> list[list[int]]:
    """The tokens that min-p, top-k and top-p keep, in order; several where one is on a border."""
    order = ordered(logits)
    if sampling.temperature == 0:
        return [order[:1]]
    scores = logits[order].astype(np.longdouble)
    weights = np.exp((scores - scores[0]) / np.longdouble(sampling.temperature))
    counts = {int((weights >= sampling.min_p * (1 + side)).sum()) for side in (-BORDER, BORDER)}
    found = []
    for count in counts:
        some = order[: max(count, 1)][: sampling.top_k or None]
        mass = np.concatenate([[0], np.cumsum(weights[: len(some)])]) / weights[: len(some)].sum()
        for kept in range(1, len(some) + 1):
            if mass[kept - 1] >= sampling.top_p + BORDER:
                break
            if kept == len(some) or mass[kept] >= sampling.top_p - BORDER:
                found.append(some[:kept])
    return found


def weights_of(logits: Logits, tokens: list[int], sampling: SamplingParams) -> list[np.longdouble]:
    scores = logits[tokens].astype(np.longdouble) - np.longdouble(logits.max())
    with np.errstate(under="ignore"):
        return list(np.exp(scores / np.longdouble(sampling.temperature or 1)))


def arrival(key: int, contender: int, weight: np.longdouble) -> np.longdouble:
    """SplitMix64 in Python's integers; an exponential time over the weight."""
    bits = (key + (contender + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    uniform = (np.longdouble((bits ^ bits >> 31) >> 12) + 0.5) / 2**52
    with np.errstate(over="ignore"):
        return np.longdouble(np.inf) if weight == 0 else -np.log(uniform) / weight


def winners(key: int, contenders: dict[int, np.longdouble]) -> set[int]:
    """Who arrives first, or almost first."""
    times = {name: arrival(key, name, weight) for name, weight in contenders.items()}
    first = min(times.values())
    return {name for name, time in times.items() if time <= first * (1 + ROUNDING)}


def block_winners(key: int, weights: dict[int, np.longdouble]) -> set[int]:
    """Who wins among all tokens: blocks of 256 ids race first."""
    blocks: dict[int, dict[int, np.longdouble]] = {}
    for token, weight in weights.items():
        blocks.setdefault(token // 256, {})[token] = weight
    first = winners(key, {2**40 + at: np.sum([*inside.values()]) for at, inside in blocks.items()})
    return set().union(*(winners(key, blocks[at - 2**40]) for at in first))


def right_tokens(logits: Logits, sampling: SamplingParams, key: int) -> set[int]:
    """The tokens that the definition allows: one, or several on a border."""
    right = right_of_candidates(logits, sampling, key, 256)
    if NEEDS_FULL_LOGITS not in right:
        return right
    order = ordered(logits)
    rest = dict(zip(order, weights_of(logits, order, sampling), strict=True))
    return right - {NEEDS_FULL_LOGITS} | block_winners(
        key, {token: rest[token] for token in order[256:]}
    )


def right_of_candidates(logits: Logits, sampling: SamplingParams, key: int, count: int) -> set[int]:
    """The same where `count` tokens race by themselves, `NEEDS_FULL_LOGITS` for all others."""
    order, right = ordered(logits), set[int]()
    weights = dict(zip(order, weights_of(logits, order, sampling), strict=True))
    is_cut = 0 < sampling.top_k < logits.size or sampling.min_p > 0 or sampling.top_p < 1
    times = np.array([arrival(key, token, weights[token]) for token in order])
    for kept in kept_sets(logits, sampling):  # thousands where the last weights are almost nothing
        if is_cut or sampling.temperature == 0 or logits.size <= count:
            some = times[: len(kept)]
            right |= {kept[at] for at in np.flatnonzero(some <= some.min() * (1 + ROUNDING))}
        else:
            named = {token: weights[token] for token in order[:count]}
            rest = np.sum([weights[token] for token in order[count:]])
            found = winners(key, named | {2**41: rest})
            right |= {NEEDS_FULL_LOGITS if token == 2**41 else token for token in found}
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
KEYS = st.one_of(st.sampled_from([0, 2**64 - 1]), st.integers(0, 2**64 - 1))


@settings(max_examples=400, deadline=None)
@given(rows_of_logits(), PARAMETERS, KEYS)
def test_the_chosen_token_is_the_one_of_the_definition(
    logits: Logits, sampling: SamplingParams, key: int
) -> None:
    (token,) = choose(logits[None], [sampling], np.array([key], np.uint64))
    assert token in right_tokens(logits, sampling, key)
    assert logits[token] > -np.inf


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(PARAMETERS, KEYS), min_size=1, max_size=6), st.integers(0, 99))
def test_rows_with_parameters_of_their_own_are_chosen_as_if_alone(
    rows: list[tuple[SamplingParams, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1 + seed % 4, (len(rows), 2100)).round(1).astype(np.float32)
    sampling, keys = [params for params, _ in rows], np.array([key for _, key in rows], np.uint64)
    alone = [
        choose(logits[[i]], sampling[i : i + 1], keys[[i]])[0].item() for i in range(len(rows))
    ]
    assert choose(logits, sampling, keys).tolist() == alone


@settings(max_examples=300, deadline=None)
@given(rows_of_logits(), PARAMETERS, KEYS, st.sampled_from([1, 3, 256]))
def test_a_few_candidates_decide_the_token_of_the_definition_or_none(
    logits: Logits, sampling: SamplingParams, key: int, count: int
) -> None:
    """As a GPU gives them: as many for each row, behind the last token none, and the total."""
    tokens, values = np.full((1, count), -1, np.int32), np.full((1, count), -np.inf, np.float32)
    best = best_ids(logits, count)
    tokens[0, : best.size], values[0, : best.size] = best, logits[best]
    totals = np.array([total(logits, sampling.temperature or 1)])
    candidates = Candidates(tokens, values, totals, logits.size)
    (token,) = draw(candidates, [sampling], np.array([key], np.uint64))
    enough = sampling.temperature == 0 or 0 < sampling.top_k <= count or logits.size <= count
    right = right_of_candidates(logits, sampling, key, count)
    assert token in right or (token == NEEDS_FULL_LOGITS and not enough)


def test_candidates_decide_as_soon_as_they_reach_p_or_win_against_the_rest() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]])).astype(np.float32)
    candidates = Candidates(
        np.array([[0, 1]]), logits[:, :2], np.array([total(logits[0], 1)]), logits.size
    )

    def decided(top_p: float, top_k: int = 0) -> set[int]:
        sampling = [SamplingParams(top_p=top_p, top_k=top_k)] * 2000
        rows = Candidates(
            candidates.tokens.repeat(2000, 0),
            candidates.logits.repeat(2000, 0),
            candidates.totals.repeat(2000),
            candidates.vocabulary,
        )
        return set(draw(rows, sampling, keys(2000)).tolist())

    assert decided(1) == {0, 1, NEEDS_FULL_LOGITS}  # the rest wins where it does
    assert [decided(top_p) for top_p in (0.39, 0.41, 0.69)] == [{0}, {0, 1}, {0, 1}]
    assert decided(0.71) == {NEEDS_FULL_LOGITS}  # of how much it is a part is not known
    assert decided(1, top_k=2) == decided(0.9, top_k=2) == {0, 1}
    assert decided(1, top_k=3) == {NEEDS_FULL_LOGITS}


def keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(1 << 64, size=count, dtype=np.uint64)


def test_what_is_drawn_does_not_depend_on_the_order_of_probabilities() -> None:
    """The least change of the logits puts each odd token before the even one below it."""
    logits = np.repeat(np.random.default_rng(5).normal(0, 2, 1000).astype(np.float32), 2)
    other = logits.copy()
    other[1::2] = np.nextafter(logits[1::2], np.float32(np.inf))
    for sampling in (SamplingParams(), SamplingParams(top_k=600), SamplingParams(top_p=0.98)):
        params = [sampling] * 1500
        first = choose(np.broadcast_to(logits, (1500, 2000)), params, keys(1500))
        again = choose(np.broadcast_to(other, (1500, 2000)), params, keys(1500))
        assert (first != again).sum() <= 3


@settings(max_examples=200, deadline=None)
@given(rows_of_logits(), st.sampled_from([1, 2, 256, 2500, 9999]))
def test_tokens_are_ordered_by_logit_and_then_by_id(logits: Logits, count: int) -> None:
    assert best_ids(logits, count).tolist() == ordered(logits)[:count]


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    logits = np.zeros((1000, 600), np.float32)
    logits[:, 500] = 1e-3
    tokens = choose(logits, [SamplingParams(top_k=4)] * 1000, keys(1000))
    assert set(tokens.tolist()) == {500, 0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 50.0])
def test_the_total_is_the_exact_sum(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 4, 5000).astype(np.float32)
    exact = np.exp((logits.astype(np.longdouble) - logits.max()) / np.longdouble(temperature)).sum()
    assert abs(total(logits, temperature) / exact - 1) < 3e-6  # in float32, added up in float64


@pytest.mark.parametrize("count", [1, 5, 256])
@pytest.mark.parametrize("step", [0.0, 0.5, 1e-4])
def test_the_first_of_a_great_vocabulary_are_those_of_a_sort(count: int, step: float) -> None:
    values = np.random.default_rng(count).normal(0, 1, 49_157)
    logits = (np.round(values / step) * step if step else values * 0).astype(np.float32)
    logits[-3:] = 9  # behind the last whole group
    assert best_ids(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


def share_of(tokens: npt.NDArray[np.int64], vocabulary: int) -> npt.NDArray[np.float64]:
    return np.bincount(tokens, minlength=vocabulary) / tokens.size


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9999)])
def test_tokens_of_many_blocks_are_drawn_as_often_as_they_should(sampling: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, 700).astype(np.float32)
    rows = np.broadcast_to(logits, (6000, 700))
    share = share_of(choose(rows, [sampling] * 6000, keys(6000)), 700)
    weights = np.exp(logits.astype(np.float64))
    right = weights / weights.sum()
    # Chi-squared of 699 degrees of freedom: six standard deviations above its mean.
    assert (6000 * (share - right) ** 2 / right).sum() < 699 + 6 * np.sqrt(2 * 699)


def test_the_rest_of_the_candidates_and_one_of_it_are_drawn_as_often_as_they_should() -> None:
    """As a GPU's candidates draw: the rest races as one, and where it wins, one of it is drawn."""
    logits = np.random.default_rng(4).normal(0, 1, 300).astype(np.float32)
    best, rows, params = best_ids(logits, 8), 20_000, [SamplingParams()] * 20_000
    candidates = Candidates(
        np.tile(best, (rows, 1)),
        np.tile(logits[best], (rows, 1)),
        np.full(rows, total(logits, 1)),
        logits.size,
    )
    tokens = draw(candidates, params, keys(rows))
    behind = np.flatnonzero(tokens == NEEDS_FULL_LOGITS)
    for row in behind.tolist():
        key = keys(rows)[[row]]
        (tokens[row],) = choose_beyond([logits], params[:1], key, candidates.select([row]))
    weights = np.exp(logits.astype(np.float64))
    right = weights / weights.sum()
    share = share_of(tokens, 300)
    assert (rows * (share - right) ** 2 / right).sum() < 299 + 6 * np.sqrt(2 * 299)


def test_nothing_is_chosen_where_nothing_is_possible() -> None:
    logits = np.zeros((5, 600), np.float32)
    logits[[0, 2, 3]] = -np.inf
    params = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)]
    params = [*params, SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)]
    tokens = choose(logits, params, keys(5))
    assert (tokens == NO_TOKEN).tolist() == [True, False, True, True, False]


def test_no_other_token_wins_where_the_last_candidate_weighs_nothing() -> None:
    """As after a grammar; what a total is too much is rounding, here far more than there is."""
    logits = np.tile(np.array([0, -np.inf], np.float32), (500, 1))
    candidates = Candidates(np.tile([3, 7], (500, 1)), logits, np.full(500, 2.0), 600)
    assert set(draw(candidates, [SamplingParams()] * 500, keys(500)).tolist()) == {3}


@pytest.mark.parametrize("is_masked", [True, False])
def test_where_rounding_leaves_a_rest_of_nothing_the_last_candidate_stands_for_it(
    is_masked: bool,
) -> None:
    logits = np.full(600, -np.inf, np.float32)
    logits[[5, 300]] = 1, 0
    blocks = np.zeros((1, 3))
    blocks[0, 0] = 1e-7 if is_masked else 0  # where no other token is
    known, temperature = np.array([[5, 300]]), np.ones(1)
    for key in keys(20):
        (token,) = race_of_rest([logits], known, temperature, np.array([key]), blocks)
        assert token == 300
