"""Log probabilities of a chosen token and of the most probable ones."""

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.generation.candidates import ranked, total
from trt_lora.runtime.generation.token import Logprob, Logprobs

_Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def logprobs_of_row(logits: npt.NDArray[np.float32], token: int, count: int) -> Logprobs:
    """Return them from all logits of a row, within 1e-6 of its log softmax in float64.

    Args:
        logits: [vocab] of the engine.
        token: the chosen one.
        count: most probable tokens, -1 for all.
    """
    wanted = logits.size if count < 0 else min(count, logits.size)
    best = ranked(logits, max(wanted, 1))[:wanted]
    base = _base(logits.max(), total(logits, 1.0))
    ranks = {token: 0} | {int(t): n for n, t in enumerate(best, 1)}
    ranks[token] = ranks[token] or _rank(logits, token)
    return {t: Logprob(float(logits[t]) - base, rank) for t, rank in ranks.items()}


def logprobs_of_candidates(
    tokens: _Ids, logits: npt.NDArray[np.float32], total_mass: float, token: int, count: int
) -> Logprobs | None:
    """Return them from the candidates of a row, None where these do not hold all of them.

    Args:
        tokens: [candidates], ranked.
        logits: [candidates].
        total_mass: exp(logit - greatest) added up over the whole vocabulary.
        token: the chosen one.
        count: most probable tokens.
    """
    places = np.flatnonzero(tokens == token)
    if not places.size or not 0 <= count <= (tokens >= 0).sum():  # behind a small vocabulary: -1
        return None
    base = _base(logits[0], total_mass)
    found = dict.fromkeys([int(places[0]), *range(count)])
    return {int(tokens[at]): Logprob(float(logits[at]) - base, at + 1) for at in found}


def _rank(logits: npt.NDArray[np.float32], token: int) -> int:
    """Return a token's place, from 1: behind the greater, and of equal ones behind lower ids."""
    greater = np.count_nonzero(logits > logits[token])
    return int(1 + greater + np.count_nonzero(logits[:token] == logits[token]))


def _base(greatest: np.float32, total_mass: float) -> float:
    """The log-sum-exp of a row."""
    return float(greatest) + float(np.log(total_mass))
