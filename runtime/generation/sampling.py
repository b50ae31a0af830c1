"""Token sampling: greedy, or temperature, then min-p, then top-k, then top-p.

Tokens are ranked: the greatest logit first, of equal ones the lower id first. Greedy takes the
first. Min-p keeps those that are at least so many times as probable as the first, top-k the first k
of them, and top-p (nucleus sampling, arXiv 1904.09751) the fewest of the first that reach p of what
top-k keeps. Which of the kept is drawn, a race by token id decides, see `race.py`: their order does
not, for rounding changes it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.generation.candidates import Candidates, ranked, total, vocabulary_weights
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.race import race_of_some, race_of_vocabulary

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]  # [rows], one a token; unused where greedy

UNDECIDED = -1  # in place of a token, where more candidates have to decide, or none can be chosen
_FEW = 256  # candidates to begin with: as many as a GPU finds, and nearly always enough
_MORE = 8  # times as many where they were not


def generator(seed: int | None, prompt: Sequence[int], answered: int = 0) -> np.random.Generator:
    """Return where a sequence's keys come from: nothing of the rest of its batch decides them.

    Args:
        seed: of its parameters, 64 bits of either sign; None is another one each time.
        prompt: token ids.
        answered: how many of the last of them are its answer so far: their keys were taken.
    """
    entropy = None if seed is None else [seed % (1 << 64), *prompt[: len(prompt) - answered]]
    draws = np.random.default_rng(np.random.SeedSequence(entropy))
    next_keys(draws, answered)
    return draws


def next_keys(draws: np.random.Generator, count: int = 1) -> Keys:
    """Return the keys of the next tokens of one sequence [count]."""
    return draws.integers(1 << 64, size=count, dtype=np.uint64)


def choose(logits: Logits, sampling: Sequence[SamplingParams], keys: Keys) -> Tokens:
    """Return one token per row, which depends on that row and its key alone.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        sampling: how to choose, for each row.
        keys: [rows].

    Returns:
        Token ids [rows]; `UNDECIDED` where all logits are -inf.
    """
    tokens = np.asarray(logits.argmax(axis=-1), np.int64)
    tokens[np.isneginf(logits[np.arange(len(tokens)), tokens])] = UNDECIDED
    drawn = [row for row, p in enumerate(sampling) if p.temperature and tokens[row] != UNDECIDED]
    if drawn:
        params = [sampling[row] for row in drawn]
        candidates = _candidates([logits[row] for row in drawn], params, _FEW)
        tokens[drawn] = draw(candidates, params, keys[drawn])
        for row, known in zip(drawn, candidates.tokens, strict=True):
            if tokens[row] == UNDECIDED:
                tokens[row] = choose_beyond(logits[row], sampling[row], keys[row], known)
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
        Token ids [rows], `UNDECIDED` where the logits themselves have to be asked.
    """
    count = candidates.tokens.shape[1]
    temperature, top_k, top_p = _parameters(sampling, candidates.vocabulary)
    weights = _weights(candidates.logits, temperature)
    mass = weights.cumsum(axis=1)
    top_k = _at_least(weights, sampling, top_k)
    last = np.minimum(top_k, count) - 1
    is_cut = (top_k < candidates.vocabulary) | [params.min_p > 0 for params in sampling]
    total_mass = np.where(is_cut, np.nan, candidates.totals)
    kept_mass = mass[np.arange(len(sampling)), last]
    total_mass = np.where(top_k <= count, kept_mass, total_mass)  # of what both keep
    ahead = np.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    nucleus = (ahead < (top_p * total_mass)[:, None]).sum(axis=1)
    # Whether that is the nucleus; nothing reaches NaN.
    is_whole = (mass[:, -1] >= top_p * total_mass) | (count >= candidates.vocabulary)
    is_open = (top_p == 1) & ~is_whole & ~np.isnan(total_mass)
    kept = np.where(is_whole, np.minimum(nucleus, last + 1), count)
    weights = np.where(np.arange(count) < kept[:, None], weights, 0)
    rest = np.where(is_open, np.maximum(total_mass - mass[:, -1], 0), 0)
    places = race_of_some(candidates.tokens, weights, keys, rest=rest)
    is_decided = (is_whole | is_open) & (places < count)
    tokens = candidates.tokens[np.arange(len(sampling)), np.minimum(places, count - 1)]
    return np.where(is_decided, tokens, UNDECIDED).astype(np.int64)


def choose_beyond(
    logits: Logits, params: SamplingParams, key: np.uint64, candidates: npt.NDArray[np.integer]
) -> int:
    """Return the token of a row whose candidates have not decided which it is.

    Args:
        logits: [vocab] of the row.
        params: how to choose.
        key: of the token.
        candidates: the token ids that were looked at [count].

    Returns:
        A token id; `UNDECIDED` where the logits are NaN.
    """
    if not _is_cut(params, logits.size):  # those that raced as one have won
        rest = logits.copy()
        rest[candidates] = -np.inf
        return race_of_vocabulary(vocabulary_weights(rest, params.temperature), key)
    count, token = len(candidates), UNDECIDED
    while token == UNDECIDED and count < logits.size:
        count *= _MORE
        more = _candidates([logits], [params], count)
        (token,) = draw(more, [params], np.array([key])).tolist()
    return token


def _is_cut(params: SamplingParams, vocabulary: int) -> bool:
    """Whether not all tokens are kept."""
    return 0 < params.top_k < vocabulary or params.min_p > 0 or params.top_p < 1


def _candidates(
    rows: Sequence[Logits], sampling: Sequence[SamplingParams], count: int
) -> Candidates:
    tokens = np.stack([ranked(row, count) for row in rows])
    logits = np.stack([row[best] for row, best in zip(rows, tokens, strict=True)])
    totals = [_total(row, params) for row, params in zip(rows, sampling, strict=True)]
    return Candidates(tokens, logits, np.array(totals), rows[0].size)


def _total(logits: Logits, params: SamplingParams) -> float:
    """What all tokens weigh; NaN where top-k or min-p makes that unimportant."""
    if 0 < params.top_k < logits.size or params.min_p:
        return np.nan
    return float(total(logits, params.temperature))


def _parameters(
    sampling: Sequence[SamplingParams], vocabulary: int
) -> tuple[npt.NDArray[np.float64], Tokens, npt.NDArray[np.float64]]:
    """Temperature, top-k and top-p of each row; greedy is top-k 1 at any temperature."""
    greedy = [params.temperature == 0 for params in sampling]
    temperature = [params.temperature or 1 for params in sampling]
    top_k = [min(params.top_k or vocabulary, vocabulary) for params in sampling]
    top_p = np.array([params.top_p for params in sampling], np.float64)
    return np.array(temperature, np.float64), np.where(greedy, 1, top_k), top_p


def _at_least(
    weights: npt.NDArray[np.float64], sampling: Sequence[SamplingParams], top_k: Tokens
) -> Tokens:
    """How many tokens min-p and top-k keep, where a candidate falls below min-p; else top-k."""
    min_p = np.array([params.min_p for params in sampling], np.float64)
    probable = (weights >= min_p[:, None]).sum(axis=1)
    return np.where(probable < weights.shape[1], np.minimum(top_k, probable), top_k)


def _weights(logits: Logits, temperature: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probability of each candidate [rows, count], in parts of the first one's."""
    with np.errstate(over="ignore"):  # so far below the first that its probability is 0
        scores = (logits.astype(np.float64) - logits[:, :1]) / temperature[:, None]
    return np.asarray(np.exp(scores))
