"""Token sampling: greedy, or temperature, then min-p, then top-k, then top-p.

Tokens are in order: the greatest logit first, of equal ones the lower id first. Greedy takes the
first. Min-p keeps those that are at least so many times as probable as the first, top-k the first k
of them, and top-p (nucleus sampling, arXiv 1904.09751) the fewest of the first that reach p of what
top-k keeps. Which of the kept is drawn, a race by token id decides, see `race.py`: their order does
not, for rounding changes it.
"""

from collections.abc import Sequence

import numpy as np

from trt_lora.runtime.engines.host_topk import (
    candidate_weights,
    find_candidates,
    rest_blocks,
    weight_blocks,
)
from trt_lora.runtime.engines.topk import NO_TOKEN, Candidates, Logits, Tokens, TopK
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.race import Keys, race_of_rest, race_of_some

NEEDS_FULL_LOGITS = -2  # in place of a token, where candidates do not decide which it is
_INITIAL_TOPK = 256  # candidates: as many as a GPU finds, and nearly always enough
_TOPK_GROWTH = 8  # times as many where they were not


def generator(seed: int | None, prompt: Sequence[int]) -> np.random.Generator:
    """Return where a sequence's keys come from: nothing of the rest of its batch decides them.

    Args:
        seed: of its parameters, 64 bits of either sign; None is another one each time.
        prompt: token ids.
    """
    entropy = None if seed is None else [seed % (1 << 64), *prompt]
    return np.random.default_rng(np.random.SeedSequence(entropy))


def next_keys(draws: np.random.Generator, count: int = 1) -> Keys:
    """Return the keys of the next tokens of one sequence [count]."""
    return np.asarray(draws.bit_generator.random_raw(count), np.uint64)


def next_key(draws: np.random.Generator) -> int:
    """Return the key of the next token of one sequence."""
    return int(draws.bit_generator.random_raw())


def choose(found: TopK, sampling: Sequence[SamplingParams], keys: Keys) -> Tokens:
    """Return one token per row, which depends on that row and its key alone.

    Args:
        found: of each row; it holds no NaN.
        sampling: how to choose, for each row.
        keys: [rows].

    Returns:
        Token ids [rows]; `NO_TOKEN` where all logits are -inf.
    """
    tokens = found.first()
    drawn = [row for row, p in enumerate(sampling) if p.temperature and tokens[row] != NO_TOKEN]
    if not drawn:
        return tokens
    params, some = [sampling[row] for row in drawn], keys[drawn]
    totals = [_total_of(each, found.vocabulary) for each in params]
    candidates = found.candidates(drawn, _INITIAL_TOPK, totals)
    tokens = tokens.copy()
    tokens[drawn] = chosen = draw(candidates, params, some)
    if missing := np.flatnonzero(chosen == NEEDS_FULL_LOGITS).tolist():
        rows = [drawn[place] for place in missing]
        some, params = some[missing], [params[place] for place in missing]
        known = candidates.select(missing)
        tokens[rows] = choose_beyond(found.logits(rows), params, some, known)
    return tokens


def draw(candidates: Candidates, sampling: Sequence[SamplingParams], keys: Keys) -> Tokens:
    """Return one token per row where the candidates decide which it is.

    Top-k needs k candidates, min-p all that are so probable, top-p those that reach p. Temperature
    alone lets the tokens that are no candidates race as one; if they win, one of them is drawn from
    their logits.

    Args:
        candidates: of each row.
        sampling: how to choose, for each row.
        keys: [rows].

    Returns:
        Token ids [rows], `NEEDS_FULL_LOGITS` where the logits themselves have to be asked.
    """
    count, vocabulary = candidates.tokens.shape[1], candidates.vocabulary
    temperature = np.array([params.temperature or 1 for params in sampling], np.float64)
    tops = [params.top_k or vocabulary if params.temperature else 1 for params in sampling]
    top_k = np.minimum(tops, vocabulary)  # greedy is top-k 1 at any temperature
    top_p = np.array([params.top_p for params in sampling], np.float64)
    min_p = np.array([params.min_p for params in sampling], np.float64)
    weights = candidate_weights(candidates, temperature)
    mass = weights.cumsum(axis=1)
    probable = (weights >= min_p[:, None]).sum(axis=1)  # all that are, if not all candidates
    top_k = np.where(probable < count, np.minimum(top_k, probable), top_k)
    last = np.minimum(top_k, count) - 1
    is_cut = (top_k < vocabulary) | (min_p > 0)
    total_mass = np.where(is_cut, np.nan, candidates.totals)
    kept_mass = mass[np.arange(len(sampling)), last]
    total_mass = np.where(top_k <= count, kept_mass, total_mass)  # of what both keep
    ahead = np.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    nucleus = (ahead < (top_p * total_mass)[:, None]).sum(axis=1)
    # Whether that is the nucleus; nothing reaches NaN.
    is_whole = (mass[:, -1] >= top_p * total_mass) | (count >= vocabulary)
    is_open = (top_p == 1) & ~is_whole & ~np.isnan(total_mass)
    kept = np.where(is_whole, np.minimum(nucleus, last + 1), count)
    weights = np.where(np.arange(count) < kept[:, None], weights, 0)
    # What is rounded is nothing where the last candidate, and so every other, weighs nothing.
    has_rest = is_open & (weights[:, -1] > 0)
    rest = np.where(has_rest, np.maximum(total_mass - mass[:, -1], 0), 0)
    places = race_of_some(candidates.tokens, weights, keys, rest=rest)
    is_decided = (is_whole | is_open) & (places < count)
    tokens = candidates.tokens[np.arange(len(sampling)), np.minimum(places, count - 1)]
    return np.where(is_decided, tokens, NEEDS_FULL_LOGITS).astype(np.int64)


def choose_beyond(
    logits: Sequence[Logits],
    sampling: Sequence[SamplingParams],
    keys: Keys,
    candidates: Candidates,
) -> Tokens:
    """Return the tokens of rows whose candidates have not decided which they are.

    Args:
        logits: of each row [vocab].
        sampling: how to choose, for each row.
        keys: [rows].
        candidates: of these rows.

    Returns:
        Token ids [rows].
    """
    tokens, some = np.empty(len(logits), np.int64), list[int]()
    for row, params in enumerate(sampling):
        is_cut = _total_of(params, candidates.vocabulary) is None or params.top_p < 1
        if is_cut:
            count = candidates.tokens.shape[1]
            tokens[row] = _widened(logits[row][None], params, keys[row], count)
        else:  # the tokens that raced as one have won
            some.append(row)
    if some:
        rows, known = [logits[row] for row in some], candidates.select(some)
        temperatures = np.array([sampling[row].temperature for row in some])
        blocks = known.blocks
        if blocks is None:
            blocks = weight_blocks(np.stack(rows), known.logits[:, 0], temperatures)
        rest = rest_blocks(blocks, known.tokens, candidate_weights(known, temperatures))
        tokens[some] = race_of_rest(rows, known.tokens, temperatures, keys[some], rest)
    return tokens


def _widened(logits: Logits, params: SamplingParams, key: np.uint64, count: int) -> int:
    """The token of a row [1, vocab] by more and more candidates."""
    token, vocabulary = NEEDS_FULL_LOGITS, logits.shape[1]
    while token == NEEDS_FULL_LOGITS and count < vocabulary:
        count *= _TOPK_GROWTH
        more = find_candidates(logits, count, [_total_of(params, vocabulary)])
        (token,) = draw(more, [params], np.array([key])).tolist()
    return token


def _total_of(params: SamplingParams, vocabulary: int) -> float | None:
    """At which temperature what all tokens weigh is of importance; None after top-k or min-p."""
    is_known_without = 0 < params.top_k < vocabulary or params.min_p
    return None if is_known_without else params.temperature
