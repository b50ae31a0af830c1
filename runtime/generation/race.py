"""One of many chosen with given probabilities, by a race whose times depend on token ids alone.

Each contender arrives after an exponential time, its own draw divided by its weight; the first wins
with a probability in proportion to its weight. Rounding of the weights changes who wins only where
the first two arrive at almost the same time, once in some 100,000 tokens; where tokens are drawn in
the order of their probabilities, two that change places change what is drawn.

A contender's draw is the SplitMix64 generator's (Steele, Lea and Flood, OOPSLA 2014) at the place
of its id, begun at the token's key: nothing is drawn for those who do not take part.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.engines.host_topk import BLOCK
from trt_lora.runtime.engines.topk import Floats, Logits, Tokens

Keys = npt.NDArray[np.uint64]  # [rows], one a token; unused where greedy
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

_BLOCK_IDS = 1 << 40  # behind all token ids: those of blocks
_REST_ID = 1 << 41  # that of all who are not named


def race_of_some(
    ids: npt.NDArray[np.integer], weights: Floats, keys: Keys, *, rest: Floats
) -> Tokens:
    """Return the place of the winner in each row [rows]; that behind the last is the rest's.

    Args:
        ids: of the contenders [rows, n].
        weights: [rows, n], one of each row above 0; 0 never wins.
        keys: [rows].
        rest: weight of all others together [rows].
    """
    names = np.pad(ids.astype(np.int64), ((0, 0), (0, 1)), constant_values=_REST_ID)
    rates = np.concatenate([weights, rest[:, None]], axis=1)
    return np.asarray(_arrivals(names, rates, keys).argmin(axis=1), np.int64)


def race_of_rest(
    logits: Sequence[Logits],
    known: npt.NDArray[np.integer],
    temperatures: Floats,
    keys: Keys,
    blocks: Floats,
) -> Tokens:
    """Return the winning id of each row [rows] among all tokens but the known ones.

    Blocks of 256 ids race first, then the ids of the block that has won. If there is none, which
    rounding may bring about, the last of those known stands for what weighs as little.

    Args:
        logits: of each row [vocab].
        known: token ids that do not take part [rows, n].
        temperatures: [rows].
        keys: [rows].
        blocks: weights of the ids that take part, added up by blocks [rows, blocks].
    """
    numbers = np.broadcast_to(np.arange(blocks.shape[1]) + _BLOCK_IDS, blocks.shape)
    firsts = _arrivals(numbers, blocks, keys).argmin(axis=1)[:, None] * BLOCK
    inside = np.full((len(firsts), BLOCK), -np.inf, np.float32)
    for row, first in enumerate(firsts[:, 0].tolist()):
        some = logits[row][first : first + BLOCK]
        inside[row, : len(some)] = some
    of_row, at = np.nonzero((known >= firsts) & (known < firsts + BLOCK))
    inside[of_row, (known - firsts)[of_row, at]] = -np.inf
    greatest = inside.max(axis=1)
    is_there = (blocks.max(axis=1) > 0) & ~np.isneginf(greatest)
    with np.errstate(over="ignore"):  # so far below the greatest that its weight is 0
        scores = inside.astype(np.float64) - np.where(is_there, greatest, 0)[:, None]
        weights = np.exp(scores / temperatures[:, None])
    places = _arrivals(firsts + np.arange(BLOCK), weights, keys).argmin(axis=1)
    return np.where(is_there, firsts[:, 0] + places, known[:, -1]).astype(np.int64)


def _arrivals(ids: Tokens, weights: Floats, keys: Keys) -> Floats:
    """When each contender arrives [rows, n]."""
    with np.errstate(over="ignore"):  # numbers of 64 bits
        bits = keys[:, None] + (ids.astype(np.uint64) + np.uint64(1)) * _GAMMA
        bits = (bits ^ (bits >> _SHIFTS[0])) * _MIX_1
        bits = (bits ^ (bits >> _SHIFTS[1])) * _MIX_2
    # Of 52 bits, at the middle of their intervals: neither 0 nor 1 is ever drawn.
    uniform = (((bits ^ (bits >> _SHIFTS[2])) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    with np.errstate(divide="ignore", over="ignore"):  # a weight of 0 never arrives
        return np.asarray(-np.log(uniform) / weights)
