"""The most probable tokens of a row in ranked order: nearly always all that sampling looks at."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GROUPS = 8  # for each token that is looked for: with more of them, fewer others are found
# Differences of logits are multiplied by no more than 1 / 1e-30, which float32 holds. Only logits
# that are as near to each other as that would be told apart by a smaller temperature.
_COLDEST = 1e-30
_LEAST_DEPTH = 4  # tokens of a group; with fewer, all tokens are partitioned as fast


@dataclass(frozen=True)
class Candidates:
    """The first tokens of each row in ranked order: greatest logit first, of equals the lower id.

    A GPU finds them beside its logits, and only they come to the host; see
    `trt_lora.plugins.kernels.candidates`.
    """

    tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64]  # [rows, count]
    logits: npt.NDArray[np.float32]  # [rows, count]; where a row has fewer tokens, -inf behind them
    # Of [rows]: exp((logit - greatest) / temperature) added up over the whole vocabulary. That is
    # the log-sum-exp without its greatest term, which would round off the rest of a small
    # temperature. NaN where top-k or min-p is given: they need the sum of their own tokens alone.
    totals: npt.NDArray[np.float64]
    vocabulary: int


def ranked(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return the first `count` token ids of one row in ranked order, or all if it has fewer.

    Args:
        logits: [vocab]; -inf is allowed, NaN is not.
        count: 1 or more.
    """
    ids = _at_least_the_first(logits, count)
    if count < ids.size:
        some = logits[ids]
        least = np.partition(some, -count)[-count]
        above = ids[some > least]
        equal = ids[some == least][: count - above.size]  # however many there are: the lower ids
        ids = np.concatenate([above, equal])
    return np.sort(_falling(logits[ids]) << 32 | ids) & 0xFFFFFFFF


def _at_least_the_first(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return ids in rising order, of the first `count` tokens and of few others.

    The count-th greatest of the maxima of disjoint groups is no greater than the count-th greatest
    logit, for that many groups have one as great: no token below it can be among the first.
    """
    depth = logits.size // (_GROUPS * count)
    if depth < _LEAST_DEPTH:
        return np.arange(logits.size)
    width = logits.size // depth
    maxima = logits[: depth * width].reshape(depth, width).max(axis=0)
    return np.flatnonzero(logits >= np.partition(maxima, -count)[-count])


def vocabulary_weights(
    logits: npt.NDArray[np.float32], temperature: float
) -> npt.NDArray[np.float32]:
    """Return exp((logit - greatest) / temperature) of one row [vocab].

    Float64 takes several times as long, and the logits are no more exact.
    """
    with np.errstate(over="ignore"):  # so far below the greatest that its weight is 0
        weights: npt.NDArray[np.float32] = logits - logits.max()
        weights *= np.float32(1 / max(temperature, _COLDEST))
    return np.exp(weights, out=weights)


def total(logits: npt.NDArray[np.float32], temperature: float) -> np.float64:
    """Return the weights of a row [vocab] added up.

    At temperature 1 its logarithm is right within 1e-6: a difference of logits below 16 is rounded
    by 4.8e-7 at most, its exponential by 3e-7, and who is farther off weighs nearly nothing.
    """
    return np.float64(vocabulary_weights(logits, temperature).sum(dtype=np.float64))


def _falling(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Integers of 32 bits that fall where the values rise: sorted many times faster than floats."""
    bits = (values + np.float32(0)).view(np.int32)  # -0 equals 0: one integer for both
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return (~rising).astype(np.int64)
