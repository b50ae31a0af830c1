"""Token sampling: greedy, or temperature, then min-p, then top-k, then top-p.

Tokens are ranked: the greatest logit first, of equal ones the lower id first. Greedy takes the
first. Min-p keeps those that are at least so many times as probable as the first, top-k the first k
of them, and top-p (nucleus sampling, arXiv 1904.09751) the fewest of the
first that reach p of what top-k keeps. Drawn is the first token up to which there is more than the
draw's part of what is kept. All of it is float64.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import OutputError
from trt_lora.runtime.generation.candidates import Candidates, ranked, total
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Draws = npt.NDArray[np.float64]

UNDECIDED = -1  # in place of a token, where more candidates have to decide
_FEW = 256  # candidates to begin with: they are nearly always enough
_MORE = 8  # times as many where they were not


def generator(
    seed: int, prompt: Sequence[int], answered: int = 0, index: int = 0
) -> np.random.Generator:
    """Return where a sequence's draws come from: nothing of the rest of its batch decides them.

    Args:
        seed: of its parameters.
        prompt: token ids.
        answered: how many of the last of them are its answer so far: their draws are made.
        index: of this answer among the `n` to one prompt.
    """
    entropy = [seed, *prompt[: len(prompt) - answered]]
    key = (index,) if index else ()  # the first answer is that of n = 1
    draws = np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=key))
    draws.random(answered)
    return draws


def choose(logits: Logits, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
    """Return one token per row, which depends on that row and its draw alone.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        sampling: how to choose, for each row.
        draws: [rows], from 0 up to 1 and not 1; unused where greedy.

    Returns:
        Token ids [rows].
    """
    tokens = np.asarray(logits.argmax(axis=-1), np.int64)
    rows, count = np.flatnonzero([params.temperature for params in sampling]), _FEW
    totals = _totals(logits, sampling)
    while rows.size:
        candidates = _candidates([logits[row] for row in rows], totals[rows], count)
        tokens[rows] = draw(candidates, [sampling[int(row)] for row in rows], draws[rows])
        rows = rows[tokens[rows] == UNDECIDED]
        if rows.size and count >= logits.shape[-1]:  # all candidates decide, unless they are NaN
            raise OutputError(f"no token can be chosen in rows {rows.tolist()}: no numbers")
        count *= _MORE
    return tokens


def draw(candidates: Candidates, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
    """Return one token per row, as `choose` does, where the candidates decide which it is.

    Top-k needs k candidates, min-p all that are so probable, top-p those that reach p, and
    temperature alone those that reach the
    draw.

    Args:
        candidates: of each row.
        sampling: how to choose, for each row.
        draws: [rows], from 0 up to 1 and not 1; unused where greedy.

    Returns:
        Token ids [rows], `UNDECIDED` where the logits themselves have to be asked.
    """
    rows, count = np.arange(len(sampling)), candidates.tokens.shape[1]
    temperature, top_k, top_p = _parameters(sampling, candidates.vocabulary)
    weights = _weights(candidates.logits, temperature)
    mass = weights.cumsum(axis=1)
    top_k = _at_least(weights, sampling, top_k)
    last = np.minimum(top_k, count) - 1
    is_cut = (top_k < candidates.vocabulary) | [params.min_p > 0 for params in sampling]
    total_mass = np.where(is_cut, np.nan, candidates.totals)
    total_mass = np.where(top_k <= count, mass[rows, last], total_mass)  # of what both keep
    ahead = np.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    nucleus = (ahead < (top_p * total_mass)[:, None]).sum(axis=1)
    is_whole = mass[:, -1] >= top_p * total_mass  # that is the nucleus; nothing reaches NaN
    kept = np.where(is_whole, mass[rows, np.minimum(nucleus - 1, last)], total_mass)
    first = (mass <= (draws * kept)[:, None]).sum(axis=1)
    decided = is_whole | ((top_p == 1) & (mass[:, -1] > draws * kept))
    tokens = candidates.tokens[rows, np.minimum(first, count - 1)]
    return np.where(decided, tokens, UNDECIDED).astype(np.int64)


def _candidates(rows: Sequence[Logits], totals: npt.NDArray[np.float64], count: int) -> Candidates:
    tokens = np.stack([ranked(row, count) for row in rows])
    logits = np.stack([row[best] for row, best in zip(rows, tokens, strict=True)])
    return Candidates(tokens, logits, totals, rows[0].size)


def _totals(logits: Logits, sampling: Sequence[SamplingParams]) -> npt.NDArray[np.float64]:
    """The total of each row, NaN where nothing asks for it."""
    return np.array(
        [
            total(row, p.temperature) if p.temperature and not (p.top_k or p.min_p) else np.nan
            for row, p in zip(logits, sampling, strict=True)
        ]
    )


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
