"""The best tokens of logits on the host, found when they are asked for."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.engines.topk import (
    NO_TOKEN,
    Candidates,
    Floats,
    Logits,
    Mask,
    Temperatures,
    Tokens,
)
from trt_lora.runtime.memory.tensor import Tensor

BLOCK = 256  # token ids whose weights are added up together
_GROUPS = 8  # for each token that is looked for: with more of them, fewer others are found
_LEAST_GROUPS = 1024  # with fewer, numpy takes longer
# Differences of logits are multiplied by no more than 1 / 1e-30, which float32 holds. Only logits
# that are as near to each other as that would be told apart by a smaller temperature.
_COLDEST = 1e-30
_FEW = 16  # tokens, whose groups alone are looked at again
_LEAST_DEPTH = 4  # tokens of a group; with fewer, all tokens are partitioned as fast
_MANY = 8  # times as many tokens as are looked for; where more may be among them, some are equal
_LAST = np.iinfo(np.int64).max
_ROWS = 8  # whose weights are computed at a time: their memory stays in the processor's cache

# Of values [rows, vocab] and a base of each row, exp(value - base) added up by blocks of 256 ids.
ExpSums = Callable[[Logits, Logits], Logits]


def numpy_exp_sums(values: Logits, bases: Logits) -> Logits:
    """Return [rows, blocks]; see `ExpSums`."""
    rows, vocabulary = values.shape
    blocks = np.zeros((-(-vocabulary // BLOCK), BLOCK), np.float32)
    weights, sums = blocks.reshape(-1)[:vocabulary], np.empty((rows, len(blocks)), np.float32)
    for row in range(rows):  # while it is in the cache
        np.subtract(values[row], bases[row], out=weights)
        np.exp(weights, out=weights)
        np.einsum("bi->b", blocks, out=sums[row])  # in half the time of `sum`
    return sums


class HostTopK:
    """A `TopK` of logits that are at hand; see there.

    A greedy step costs two looks at the logits, and no search.
    """

    def __init__(self, logits: Logits, exp_sums: ExpSums = numpy_exp_sums) -> None:
        """Look at nothing yet.

        Args:
            logits: [rows, vocab]; -inf is allowed. They may change only once they were looked at.
            exp_sums: the fastest there is.
        """
        self._logits, self._exp_sums = logits, exp_sums
        self._last: tuple[tuple[Sequence[int], Temperatures], int, Candidates] | None = None

    @classmethod
    def of(cls, logits: Tensor, exp_sums: ExpSums = numpy_exp_sums) -> "HostTopK":
        """Return that of an engine's output [rows, vocab]."""
        return cls(logits.numpy().astype(np.float32, copy=False), exp_sums)

    @property
    def vocabulary(self) -> int:
        """See `TopK`."""
        return int(self._logits.shape[1])

    def __len__(self) -> int:
        """See `TopK`."""
        return len(self._logits)

    def is_finite(self) -> Mask:
        """See `TopK`; NaN and infinity are the greatest, or -inf is the least."""
        _, greatest = self._greatest
        return np.asarray(np.isfinite(greatest) & np.isfinite(self._logits.min(axis=1)), np.bool_)

    def first(self) -> Tokens:
        """See `TopK`."""
        tokens, greatest = self._greatest
        return np.where(greatest == -np.inf, NO_TOKEN, tokens)

    def candidates(self, rows: Sequence[int], count: int, temperatures: Temperatures) -> Candidates:
        """See `TopK`; more may be there, from a search before."""
        asked = rows, temperatures
        if self._last is None or self._last[0] != asked or self._last[1] < count:
            found = find_candidates(self._matrix(rows), count, temperatures, self._exp_sums)
            self._last = asked, count, found
        return self._last[2]

    def logits(self, rows: Sequence[int]) -> list[Logits]:
        """See `TopK`; nothing is copied."""
        return [self._logits[row] for row in rows]

    def select(self, rows: Sequence[int]) -> "HostTopK":
        """See `TopK`."""
        return self if _are_all(rows, len(self)) else HostTopK(self._matrix(rows), self._exp_sums)

    def _matrix(self, rows: Sequence[int]) -> Logits:
        """Logits of some rows [rows, vocab]; of all it is no copy."""
        return self._logits if _are_all(rows, len(self)) else self._logits[[*rows]]

    @cached_property
    def _greatest(self) -> tuple[Tokens, Logits]:
        """The first greatest of each row, or NaN: its id, its logit."""
        tokens = np.asarray(self._logits.argmax(axis=1), np.int64)
        return tokens, self._logits[np.arange(len(tokens)), tokens]


def find_candidates(
    logits: Logits,
    count: int,
    temperatures: Temperatures,
    exp_sums: ExpSums = numpy_exp_sums,
) -> Candidates:
    """Search logits.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        count: tokens of each row, or all if there are fewer.
        temperatures: of the totals [rows].
        exp_sums: the fastest there is.
    """
    tokens = topk_ids(logits, count)
    values = logits[np.arange(len(logits))[:, None], tokens]
    at = np.array([t or 1 for t in temperatures if t is not None], np.float64)
    if at.size == len(logits):
        blocks = weight_blocks(logits, values[:, 0].copy(), at, exp_sums)
    else:
        some = [row for row, temperature in enumerate(temperatures) if temperature is not None]
        blocks = np.zeros((len(logits), -(-logits.shape[1] // BLOCK)), np.float32)
        blocks[some] = weight_blocks(logits[some], values[some, 0], at, exp_sums)
    totals = blocks.sum(axis=1, dtype=np.float64)
    totals[[temperature is None for temperature in temperatures]] = np.nan
    return Candidates(tokens, values, totals, logits.shape[1], blocks)


def weight_blocks(
    logits: Logits, greatest: Logits, temperatures: Floats, exp_sums: ExpSums = numpy_exp_sums
) -> Logits:
    """Return exp((logit - greatest) / temperature) of all tokens added up by blocks of 256 ids.

    They are right within 1e-6 of the sum of all: a difference of logits below 16 is rounded by
    4.8e-7 at most, its exponential by 3e-7, and who is farther off weighs nearly nothing. Float64
    takes several times as long, and the logits are no more exact.

    Args:
        logits: [rows, vocab].
        greatest: of each row [rows], finite.
        temperatures: [rows].
        exp_sums: the fastest there is.

    Returns:
        [rows, blocks].
    """
    sums = np.empty((len(logits), -(-logits.shape[1] // BLOCK)), np.float32)
    with np.errstate(over="ignore"):  # so far below the greatest that its weight is 0
        for first in range(0, len(logits), _ROWS):
            part = slice(first, first + _ROWS)
            values, bases = logits[part], greatest[part]
            if not (temperatures[part] == 1).all():
                factors = (1 / np.maximum(temperatures[part], _COLDEST)).astype(np.float32)
                values, bases = (values - bases[:, None]) * factors[:, None], np.zeros_like(bases)
            sums[part] = exp_sums(values, bases)
    return sums


def candidate_weights(candidates: Candidates, temperatures: Floats) -> Floats:
    """Return exp((logit - greatest) / temperature) of each candidate [rows, count]."""
    logits = candidates.logits
    with np.errstate(over="ignore"):  # so far below the first that its weight is 0
        scores = (logits.astype(np.float64) - logits[:, :1]) / temperatures[:, None]
    return np.asarray(np.exp(scores))


def rest_blocks(blocks: Logits, known: npt.NDArray[np.integer], weights: Floats) -> Floats:
    """Return what is left of the weights of blocks without the candidates [rows, blocks].

    Args:
        blocks: of all tokens; see `weight_blocks`.
        known: the candidates [rows, count], best first.
        weights: of these.
    """
    rows, count = blocks.shape
    places = known // BLOCK + np.arange(rows)[:, None] * count
    of_known = np.bincount(places.ravel(), weights.ravel(), rows * count).reshape(rows, count)
    # No other weighs more than the last candidate; so what is rounded never weighs more than that.
    return np.asarray(np.clip(blocks - of_known, 0, BLOCK * weights[:, -1:]), np.float64)


def topk_ids(logits: Logits, count: int) -> Tokens:
    """Return the first token ids of each row, best first [rows, count], or all if it has fewer.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        count: 1 or more.
    """
    rows, vocabulary = logits.shape
    found = _at_least_the_first(logits, min(count, vocabulary))
    ends = np.searchsorted(found, np.arange(rows + 1) * vocabulary)
    counts, ids = ends[1:] - ends[:-1], found % vocabulary
    widest = int(counts.max())
    if widest > max(_MANY * count, vocabulary // _MANY):
        pairs = zip(logits, np.split(ids, ends[1:-1]), strict=True)
        return np.stack([_topk_of_row(row, some, min(count, vocabulary)) for row, some in pairs])
    keys = np.full((rows, widest), _LAST)
    keys[np.arange(widest) < counts[:, None]] = _falling(logits.reshape(-1)[found]) << 32 | ids
    keys.sort(axis=1)
    return keys[:, :count] & 0xFFFFFFFF


def _topk_of_row(logits: Logits, ids: Tokens, count: int) -> Tokens:
    """As `topk_ids` of one row [vocab], where these ids, in rising order, hold its first tokens."""
    some = logits[ids]
    least = np.partition(some, -count)[-count]
    above = ids[some > least]
    equal = ids[some == least][: count - above.size]  # however many there are: the lower ids
    ids = np.concatenate([above, equal])
    return np.sort(_falling(logits[ids]) << 32 | ids) & 0xFFFFFFFF


def _at_least_the_first(logits: Logits, count: int) -> npt.NDArray[np.intp]:
    """Return places in the flattened logits, in rising order: of the first tokens and few others.

    The count-th greatest of the maxima of disjoint groups is no greater than the count-th greatest
    logit, for that many groups have one as great: no token below it can be among the first.
    """
    rows, vocabulary = logits.shape
    depth = vocabulary // max(_GROUPS * count, _LEAST_GROUPS)
    if depth < _LEAST_DEPTH:
        return np.arange(logits.size)
    width = vocabulary // depth
    grouped, others = logits[:, : depth * width], logits[:, depth * width :]
    maxima = grouped.reshape(rows, depth, width).max(axis=1)
    floors = np.partition(maxima, width - count, axis=1)[:, width - count, None]
    if count > _FEW:
        return np.flatnonzero(logits >= floors)
    of_row, group = np.nonzero(maxima >= floors)  # the others hold none
    places = (of_row * vocabulary + group)[:, None] + np.arange(depth) * width
    places = places[logits.reshape(-1)[places] >= floors[of_row]]
    of_row, other = np.nonzero(others >= floors)
    return np.sort(np.concatenate([places, of_row * vocabulary + depth * width + other]))


def _falling(values: Logits) -> npt.NDArray[np.int64]:
    """Integers of 32 bits that fall where the values rise: sorted many times faster than floats."""
    bits = (values + np.float32(0)).view(np.int32)  # -0 equals 0: one integer for both
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return (~rising).astype(np.int64)


def _are_all(rows: Sequence[int], count: int) -> bool:
    return len(rows) == count and all(row == place for place, row in enumerate(rows))
