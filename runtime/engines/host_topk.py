"""The best tokens of logits on the host, found when they are asked for."""

from collections.abc import Sequence
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
_LEAST_GROUPS = 512  # with fewer, numpy takes longer
# Differences of logits are multiplied by no more than 1 / 1e-30, which float32 holds. Only logits
# that are as near to each other as that would be told apart by a smaller temperature.
_COLDEST = 1e-30
_LEAST_DEPTH = 4  # tokens of a group; with fewer, all tokens are partitioned as fast
_MANY = 8  # times as many tokens as are looked for; where more may be among them, some are equal
_LAST = np.iinfo(np.int64).max


class HostTopK:
    """A `TopK` of logits that are at hand; see there.

    A greedy step costs two looks at the logits, and no search.
    """

    def __init__(self, logits: Logits) -> None:
        """Look at nothing yet.

        Args:
            logits: [rows, vocab]; -inf is allowed. They may change only once they were looked at.
        """
        self._logits = logits
        self._last: tuple[tuple[Sequence[int], Temperatures], int, Candidates] | None = None

    @classmethod
    def of(cls, logits: Tensor) -> "HostTopK":
        """Return that of an engine's output [rows, vocab] on the host."""
        return cls(logits.numpy().astype(np.float32, copy=False))

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
        return np.where(np.isneginf(greatest), NO_TOKEN, tokens)

    def candidates(self, rows: Sequence[int], count: int, temperatures: Temperatures) -> Candidates:
        """See `TopK`; more may be there, from a search before."""
        asked = rows, temperatures
        if self._last is None or self._last[0] != asked or self._last[1] < count:
            self._last = asked, count, find_candidates(self.logits(rows), count, temperatures)
        return self._last[2]

    def logits(self, rows: Sequence[int]) -> Logits:
        """See `TopK`; all rows are no copy."""
        return self._logits if _are_all(rows, len(self)) else self._logits[[*rows]]

    def select(self, rows: Sequence[int]) -> "HostTopK":
        """See `TopK`."""
        return self if _are_all(rows, len(self)) else HostTopK(self.logits(rows))

    @cached_property
    def _greatest(self) -> tuple[Tokens, Logits]:
        """The first greatest of each row, or NaN: its id, its logit."""
        tokens = np.asarray(self._logits.argmax(axis=1), np.int64)
        return tokens, self._logits[np.arange(len(tokens)), tokens]


def find_candidates(logits: Logits, count: int, temperatures: Temperatures) -> Candidates:
    """Search logits.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        count: tokens of each row, or all if there are fewer.
        temperatures: of the totals [rows].
    """
    rows, vocabulary = logits.shape
    best = topk_ids(logits, count + 1)  # and the greatest of all others
    values = np.take_along_axis(logits, best, axis=1)
    tokens, kept = best[:, :count], values[:, :count]
    totals, rest = np.full(rows, np.nan), np.zeros((rows, -(-vocabulary // BLOCK)))
    some = [row for row, temperature in enumerate(temperatures) if temperature is not None]
    if some:
        divisors = np.array([temperatures[row] or 1 for row in some], np.float64)[:, None]
        with np.errstate(over="ignore"):  # so far below the first that the weight is 0
            weights = np.exp((values[some].astype(np.float64) - values[some, :1]) / divisors)
        totals[some] = weights[:, :count].cumsum(axis=1)[:, -1]  # as `draw` does, to the bit
        if vocabulary > count:
            greatest = values[some, count]
            rest[some] = rest_blocks(logits, tokens, divisors[:, 0], greatest, some)
            totals[some] += weights[:, count] * rest[some].sum(axis=1)
    return Candidates(tokens, kept, totals, vocabulary, rest)


def rest_blocks(
    logits: Logits, known: Tokens, temperatures: Floats, greatest: Logits, rows: Sequence[int]
) -> Floats:
    """Return the weights of all tokens but the known ones, added up by blocks of ids.

    They are right within 1e-6: a difference of logits below 16 is rounded by 4.8e-7 at most, its
    exponential by 3e-7, and who is farther off weighs nearly nothing. Float64 takes several times
    as long, and the logits are no more exact.

    Args:
        logits: [all rows, vocab].
        known: token ids [all rows, count].
        temperatures: of some rows [n].
        greatest: logit of the others [n], which weighs 1.
        rows: which rows [n].

    Returns:
        [n, blocks of ids].
    """
    vocabulary = logits.shape[1]
    blocks = np.zeros((-(-vocabulary // BLOCK), BLOCK), np.float32)
    weights, sums = blocks.reshape(-1)[:vocabulary], np.empty((len(rows), len(blocks)))
    for place, row in enumerate(rows):
        weigh(logits[row], temperatures[place], greatest[place], out=weights)
        weights[known[row]] = 0
        sums[place] = blocks.sum(axis=1)
    return sums


def weigh(logits: Logits, temperature: float, greatest: np.float32, *, out: Logits) -> None:
    """Write exp((logit - greatest) / temperature) of each logit; 0 where all are -inf."""
    with np.errstate(over="ignore"):  # what is too great is known, what is too small weighs 0
        np.subtract(logits, 0 if np.isneginf(greatest) else greatest, out=out)
        if temperature != 1:
            np.multiply(out, np.float32(1 / max(temperature, _COLDEST)), out=out)
        np.exp(out, out=out)


def topk_ids(logits: Logits, count: int) -> Tokens:
    """Return the first token ids of each row, best first [rows, count], or all if it has fewer.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        count: 1 or more.
    """
    rows, vocabulary = logits.shape
    floors = _floors(logits, min(count, vocabulary))
    found = np.flatnonzero(logits >= floors[:, None])
    ends = np.searchsorted(found, np.arange(rows + 1) * vocabulary)
    counts = np.diff(ends)
    if counts.max() > max(_MANY * count, vocabulary // _MANY):
        pairs = zip(logits, np.split(found % vocabulary, ends[1:-1]), strict=True)
        return np.stack([_topk_of_row(row, ids, min(count, vocabulary)) for row, ids in pairs])
    keys = np.full((rows, counts.max()), _LAST)
    falling = _falling(logits.reshape(-1)[found])
    keys[np.arange(counts.max()) < counts[:, None]] = falling << 32 | found % vocabulary
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


def _floors(logits: Logits, count: int) -> Logits:
    """Return logits [rows] that are no greater than the first `count` of each row, nor much less.

    The count-th greatest of the maxima of disjoint groups is no greater than the count-th greatest
    logit, for that many groups have one as great: no token below it can be among the first.
    """
    rows, vocabulary = logits.shape
    depth = vocabulary // max(_GROUPS * count, _LEAST_GROUPS)
    if depth < _LEAST_DEPTH:
        return np.full(rows, -np.inf, np.float32)
    width = vocabulary // depth
    maxima = logits[:, : depth * width].reshape(rows, depth, width).max(axis=1)
    return np.partition(maxima, width - count, axis=1)[:, width - count]


def _falling(values: Logits) -> npt.NDArray[np.int64]:
    """Integers of 32 bits that fall where the values rise: sorted many times faster than floats."""
    bits = (values + np.float32(0)).view(np.int32)  # -0 equals 0: one integer for both
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return (~rising).astype(np.int64)


def _are_all(rows: Sequence[int], count: int) -> bool:
    return len(rows) == count and all(row == place for place, row in enumerate(rows))
