"""Log probabilities of a chosen token and of the most probable ones."""

from collections.abc import Sequence

import numpy as np

from trt_lora.runtime.engines.host_topk import find_candidates
from trt_lora.runtime.engines.topk import Candidates, Logits, Tokens, TopK
from trt_lora.runtime.generation.token import Logprob, Logprobs

_MOST = 256  # tokens that are looked for in all rows; a row that wants more is searched alone


def logprobs_of(found: TopK, tokens: Tokens, counts: Sequence[int | None]) -> list[Logprobs | None]:
    """Return those of each row that asks for them, within 1e-6 of its log softmax in float64.

    Logits come from a device only where its candidates do not tell.

    Args:
        found: of each row, by an engine.
        tokens: the chosen ones [rows].
        counts: most probable tokens of each row, -1 for all; None where nothing is asked for.

    Returns:
        By row, None where nothing is asked for.
    """
    result: list[Logprobs | None] = [None] * len(counts)
    wanted = {
        row: found.vocabulary if count < 0 else min(count, found.vocabulary)
        for row, count in enumerate(counts)
        if count is not None
    }
    rows = list(wanted)
    if rows:
        most = max((count for count in wanted.values() if count <= _MOST), default=0)
        candidates = found.candidates(rows, max(most, 1), [1.0] * len(rows))
        for place, row in enumerate(rows):
            result[row] = _of_row(found, candidates, place, row, int(tokens[row]), wanted[row])
    return result


def _of_row(
    found: TopK, candidates: Candidates, place: int, row: int, token: int, count: int
) -> Logprobs:
    """Those of a row, which has a place among the candidates."""
    total = candidates.totals[place]
    best = candidates.tokens[place, :count]
    if np.isnan(total) or len(best) < count or (best < 0).any():  # behind a small vocabulary: -1
        candidates, place = find_candidates(found.logits([row]), max(count, 1), [1.0]), 0
        total, best = candidates.totals[0], candidates.tokens[0, :count]
    values = candidates.logits[place]
    base = float(values[0]) + float(np.log(total))  # the log-sum-exp of the row
    (at,) = np.nonzero(candidates.tokens[place] == token)
    if at.size:
        chosen = Logprob(float(values[at[0]]) - base, int(at[0]) + 1)
    else:
        (logits,) = found.logits([row])
        chosen = Logprob(float(logits[token]) - base, _rank(logits, token))
    pairs = enumerate(zip(best.tolist(), values.tolist()), 1)  # noqa: B905 - as many as are wanted
    return {token: chosen} | {t: Logprob(value - base, n) for n, (t, value) in pairs}


def _rank(logits: Logits, token: int) -> int:
    """Return a token's place, from 1: behind the greater, and of equal ones behind lower ids."""
    greater = np.count_nonzero(logits > logits[token])
    return int(1 + greater + np.count_nonzero(logits[:token] == logits[token]))
