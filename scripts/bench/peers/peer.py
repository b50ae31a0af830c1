"""The interface of a peer: load a model with an adapter, and answer.

A peer's interpreter has its own packages and none of this project's: this file and those of
`methods` other than `ours` import the standard library and what the peer brings, no more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

Rows = list[list[int]]  # tokens [rows][tokens]


@dataclass(frozen=True)
class Setup:
    """What a peer loads."""

    files: tuple[Path, ...]  # the peer's own: an engine, a converted model, its adapter
    model: Path  # transformers directory
    adapter: Path  # PEFT directory, active in all that is measured
    threads: int
    max_rows: int  # sequences at a time, most
    max_len: int  # tokens of a sequence, most


class PeerAnswer(NamedTuple):
    """What one answer took, in seconds, and its tokens."""

    prompt: float  # to the first token of all rows
    decode: float  # for all that follow
    tokens: Rows


class Peer(Protocol):
    """A way to run a model with an adapter, float32 on a CPU; every choice is greedy."""

    def load(self, setup: Setup) -> None:
        """Load model and adapter, and activate the adapter."""

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Answer rows of one length [rows][seq] with `steps` tokens after the first.

        Caches are allocated before the clock starts. No stop token ends an answer.
        """
        ...


def timed(first: Callable[[], Rows], rest: Callable[[], Rows]) -> PeerAnswer:
    """Make the first token of each row, then all others."""
    start = time.perf_counter()
    tokens = first()
    middle = time.perf_counter()
    more = rest()
    end = time.perf_counter()
    joined = [[*row, *others] for row, others in zip(tokens, more, strict=True)]
    return PeerAnswer(middle - start, end - middle, joined)
