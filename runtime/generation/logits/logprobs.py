"""Log probabilities of a chosen token and of the most probable ones."""

import math
from collections.abc import Sequence

import numpy as np

from trt_lora.runtime.engines.host_topk import find_candidates
from trt_lora.runtime.engines.topk import NO_TOKEN, Candidates, Logits, Tokens, TopK
from trt_lora.runtime.generation.token import Logprob, Logprobs

_MOST = 256  # tokens that are looked for in all rows; a row that wants more is searched alone


# Which tokens, or how many of the most probable, -1 for all; None where nothing is asked for.
Wanted = int | Sequence[int] | None


def logprobs_of(found: TopK, tokens: Tokens, asked: Sequence[Wanted]) -> list[Logprobs | None]:
    """Return those of each row that asks for them, within 1e-6 of its log softmax in float64.

    Logits come from a device only where its candidates do not tell.

    Args:
        found: of each row, by an engine.
        tokens: the chosen ones [rows].
        asked: what each row asks for.

    Returns:
        By row, None where nothing is asked for.
    """
    wanted = {
        row: found.vocabulary if count < 0 else min(count, found.vocabulary)
        for row, count in enumerate(asked)
        if isinstance(count, int)
    }
    rows, result = list(wanted), list[Logprobs | None]([None] * len(asked))
    for row, listed in enumerate(asked):
        if isinstance(listed, Sequence):
            result[row] = _of_tokens(found, row, [int(tokens[row]), *listed])
    if rows:
        most = max((count for count in wanted.values() if count <= _MOST), default=0)
        candidates = found.candidates(rows, max(most, 1), [1.0] * len(rows))
        best = _listed(candidates, tokens[rows], most)
        for row, of_row in zip(rows, best, strict=True):
            result[row] = _of_row(found, row, int(tokens[row]), wanted[row], of_row)
    return result


# Of a row: its first tokens, what each has, the row's log-sum-exp, the place of the chosen token.
_Best = tuple[list[int], list[float], float, int]


def _listed(candidates: Candidates, chosen: Tokens, count: int) -> list[_Best]:
    """The first tokens of each row; the place of one that is no candidate is -1."""
    is_chosen = candidates.tokens == chosen[:, None]
    places = np.where(is_chosen.any(axis=1), is_chosen.argmax(axis=1), -1)
    bases = candidates.logits[:, 0] + np.log(candidates.totals)
    columns = max(count, int(places.max()) + 1)
    logprobs = candidates.logits[:, :columns] - bases[:, None]
    lists = candidates.tokens[:, :columns], logprobs, bases, places
    return list(zip(*(array.tolist() for array in lists), strict=True))


def _of_row(found: TopK, row: int, token: int, count: int, best: _Best) -> Logprobs:
    tokens, logprobs, base, place = best
    if len(tokens) < count or math.isnan(base) or NO_TOKEN in tokens[:count]:
        logits = np.stack(found.logits([row]))
        candidates = find_candidates(logits, max(count, 1), [1.0])
        ((tokens, logprobs, base, place),) = _listed(candidates, np.array([token]), count)
    if place >= 0:
        chosen = Logprob(logprobs[place], place + 1)
    else:
        (of_row,) = found.logits([row])
        chosen = Logprob(float(of_row[token]) - base, _rank(of_row, token))
    known = map(Logprob, logprobs, range(1, count + 1))
    return {token: chosen} | dict(zip(tokens, known))  # noqa: B905 - as many as are known


def _of_tokens(found: TopK, row: int, tokens: Sequence[int]) -> Logprobs:
    (logits,) = found.logits([row])
    best = find_candidates(logits[None], 1, [1.0])
    base = float(best.logits[0, 0] + np.log(best.totals[0]))
    return {token: Logprob(float(logits[token]) - base, _rank(logits, token)) for token in tokens}


def _rank(logits: Logits, token: int) -> int:
    """Return a token's place, from 1: behind the greater, and of equal ones behind lower ids."""
    greater = np.count_nonzero(logits > logits[token])
    return int(1 + greater + np.count_nonzero(logits[:token] == logits[token]))
