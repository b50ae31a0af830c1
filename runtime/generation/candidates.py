"""The most probable tokens of a row in ranked order: nearly always all that sampling looks at."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GROUPS = 8  # for each token that is looked for: with more of them, fewer others are found
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


def total(logits: npt.NDArray[np.float32], temperature: float) -> np.float64:
    """Return exp((logit - greatest) / temperature) added up over the logits [vocab] of one row."""
    below = logits.astype(np.float64)
    below -= logits.max()
    with np.errstate(over="ignore"):  # so far below that it adds nothing
        below /= temperature
    return np.float64(np.exp(below, out=below).sum())


def _falling(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Integers of 32 bits that fall where the values rise: sorted many times faster than floats."""
    bits = (values + np.float32(0)).view(np.int32)  # -0 equals 0: one integer for both
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    return (~rising).astype(np.int64)
