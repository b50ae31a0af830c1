"""Log probabilities against sums of the whole vocabulary, in `longdouble`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from trt_lora.runtime.engines.host_topk import HostTopK, find_candidates
from trt_lora.runtime.engines.topk import Candidates, Logits, Temperatures
from trt_lora.runtime.generation.logits.logprobs import logprobs_of
from trt_lora.runtime.generation.token import Logprobs

VOCABULARY, CANDIDATES = 700, 256


def some_logits(scale: float) -> npt.NDArray[np.float32]:
    """Many of them equal."""
    rng = np.random.default_rng(0)
    return (rng.normal(0, 1, VOCABULARY).round(1) * scale).astype(np.float32)


def check(found: Logprobs, logits: npt.NDArray[np.float32], token: int, count: int) -> None:
    order = sorted(range(VOCABULARY), key=lambda t: (-float(logits[t]), t))
    exact = logits.astype(np.longdouble)
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    best = order if count < 0 else order[:count]
    assert next(iter(found)) == token
    assert set(found) == {token, *best}
    for other, known in found.items():
        assert known.rank == order.index(other) + 1
        assert known.logprob == pytest.approx(float(exact[other]), rel=0, abs=1e-6)


def logprobs_of_row(logits: npt.NDArray[np.float32], token: int, count: int) -> Logprobs:
    (found,) = logprobs_of(HostTopK(logits[None]), np.array([token]), [count])
    assert found is not None
    return found


@pytest.mark.parametrize("scale", [0.1, 3.0, 80.0])
@pytest.mark.parametrize("count", [0, 1, 5, -1, 10_000])
def test_log_probabilities_are_the_log_softmax(scale: float, count: int) -> None:
    logits = some_logits(scale)
    for token in (0, int(logits.argmax()), VOCABULARY - 1):
        check(logprobs_of_row(logits, token, count), logits, token, min(count, VOCABULARY))


@pytest.mark.parametrize("below", [8.1, 10.3, 12.4])
def test_many_that_are_rounded_alike_stay_within_the_accuracy_promised(below: float) -> None:
    logits = np.full(200_000, -below, np.float32)
    logits[7] = 0
    exact = np.log1p((logits.size - 1) * np.exp(np.longdouble(logits[0])))
    assert logprobs_of_row(logits, 7, 1)[7].logprob == pytest.approx(-float(exact), rel=0, abs=1e-6)


@pytest.mark.parametrize("token", [0, 2, 3, 4])
def test_a_token_outside_the_best_has_a_rank(token: int) -> None:
    logits = np.array([1, 3, 1, 2, 1], np.float32)
    rank = {0: 3, 2: 4, 3: 2, 4: 5}[token]
    assert {t: known.rank for t, known in logprobs_of_row(logits, token, 1).items()} == {
        token: rank,
        1: 1,
    }


@pytest.mark.parametrize("scale", [0.1, 3.0, 80.0])
def test_tokens_that_are_named_are_listed_behind_the_chosen_one(scale: float) -> None:
    logits = some_logits(scale)
    named = [VOCABULARY - 1, 5, int(logits.argmin()), 7]
    rows = np.stack([logits, logits[::-1]])
    asked = [named, None]
    for token in (0, 5, int(logits.argmax())):
        found, nothing = logprobs_of(HostTopK(rows), np.array([token, 0]), asked)
        assert nothing is None
        assert found is not None
        assert list(found) == list(dict.fromkeys([token, *named]))
        of_all = logprobs_of_row(logits, token, -1)
        for other, known in found.items():
            assert known.rank == of_all[other].rank
            assert known.logprob == pytest.approx(of_all[other].logprob, rel=0, abs=1e-6)


class FewFound(HostTopK):
    """Candidates as a device finds them: so many, whatever is asked for, and -1 behind them."""

    def __init__(self, logits: npt.NDArray[np.float32], at: float = 1.0) -> None:
        super().__init__(logits[None])
        self.fetched = 0  # rows of logits
        self._found = find_candidates(logits[None], CANDIDATES, [at])
        self._at = at

    def candidates(self, rows: Sequence[int], count: int, temperatures: Temperatures) -> Candidates:
        found, missing = self._found, CANDIDATES - self._found.tokens.shape[1]
        tokens = np.pad(found.tokens.astype(np.int32), ((0, 0), (0, missing)), constant_values=-1)
        values = np.pad(found.logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        totals = found.totals if temperatures == [self._at] else np.full(1, np.nan)
        return Candidates(tokens, values, totals, found.vocabulary)

    def logits(self, rows: Sequence[int]) -> list[Logits]:
        self.fetched += len(rows)
        return super().logits(rows)


@pytest.mark.parametrize("count", [0, 1, 20, CANDIDATES])
def test_candidates_and_the_total_tell_the_same(count: int) -> None:
    logits = some_logits(3.0)
    best = np.argsort(-logits, kind="stable")
    for token in map(int, best[[0, 7, CANDIDATES - 1]]):
        found = FewFound(logits)
        (known,) = logprobs_of(found, np.array([token]), [count])
        check(known or {}, logits, token, count)
        assert not found.fetched


def test_logits_are_fetched_where_candidates_do_not_hold_what_is_asked_for() -> None:
    logits = some_logits(3.0)
    best = np.argsort(-logits, kind="stable")
    outside, first = int(best[CANDIDATES]), int(best[0])
    for token, count in ((outside, 1), (first, CANDIDATES + 1), (first, -1)):
        found = FewFound(logits)
        (known,) = logprobs_of(found, np.array([token]), [count])
        check(known or {}, logits, token, count)
        assert found.fetched
    at_another_temperature = FewFound(logits, at=1.7)
    (known,) = logprobs_of(at_another_temperature, np.array([first]), [2])
    check(known or {}, logits, first, 2)


def test_behind_the_last_token_of_a_small_vocabulary_is_none() -> None:
    logits = np.array([0, 1], np.float32)
    for count in (1, 2, 3, -1):
        (known,) = logprobs_of(FewFound(logits), np.array([1]), [count])
        assert set(known or {}) == ({1} if count == 1 else {0, 1})


def test_rows_ask_for_log_probabilities_of_their_own_and_some_for_none() -> None:
    logits = np.stack([some_logits(scale) for scale in (0.1, 3.0, 80.0, 1.0)])
    tokens, counts = np.array([5, int(logits[1].argmax()), 0, 699]), [3, None, -1, 300]
    found = logprobs_of(HostTopK(logits), tokens, counts)
    assert found[1] is None
    for row in (0, 2, 3):
        check(found[row] or {}, logits[row], int(tokens[row]), counts[row] or 0)
