"""Log probabilities against sums of the whole vocabulary, in `longdouble`."""

import numpy as np
import numpy.typing as npt
import pytest

from trt_lora.runtime.generation.candidates import ranked, total
from trt_lora.runtime.generation.logits.logprobs import logprobs_of_candidates, logprobs_of_row
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


@pytest.mark.parametrize("count", [0, 1, 20, CANDIDATES])
def test_candidates_and_the_total_tell_the_same(count: int) -> None:
    logits = some_logits(3.0)
    best, mass = ranked(logits, CANDIDATES), float(total(logits, 1.0))
    for token in map(int, best[[0, 7, CANDIDATES - 1]]):
        found = logprobs_of_candidates(best, logits[best], mass, token, count)
        assert found is not None
        check(found, logits, token, count)


def test_candidates_that_do_not_hold_what_is_asked_for_say_so() -> None:
    logits = some_logits(3.0)
    best, mass = ranked(logits, CANDIDATES), float(total(logits, 1.0))
    outside = int(ranked(logits, VOCABULARY)[CANDIDATES])
    first = int(best[0])
    for token, count in ((outside, 1), (first, CANDIDATES + 1), (first, -1)):
        assert logprobs_of_candidates(best, logits[best], mass, token, count) is None
    padded = np.array([4, 2, -1, -1], np.int32)  # as a GPU gives a vocabulary of two
    values = np.array([1, 0, -np.inf, -np.inf], np.float32)
    assert logprobs_of_candidates(padded, values, 1.4, 4, 3) is None
    assert set(logprobs_of_candidates(padded, values, 1.4, 4, 2) or {}) == {4, 2}
