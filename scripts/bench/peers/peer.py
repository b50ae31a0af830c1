"""The interface of a peer: load a model with an adapter, run prompts, decode.

A peer's interpreter has its own packages and none of this project's: this file and those of
`methods` other than `ours` import the standard library and what the peer brings, no more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Setup:
    """What a peer loads."""

    files: tuple[Path, ...]  # the peer's own: an engine, a converted model, its adapter
    model: Path  # transformers directory
    adapter: Path  # PEFT directory, active in all that is measured
    threads: int
    max_rows: int  # sequences at a time, most
    max_len: int  # tokens of a sequence, most


class Timed(NamedTuple):
    """Seconds, and the tokens that they made, by row [rows][tokens]."""

    seconds: float
    tokens: list[list[int]]


class Peer(Protocol):
    """A way to run a model with an adapter, float32 on a CPU; every choice is greedy."""

    def load(self, setup: Setup) -> None:
        """Load model and adapter, and activate the adapter."""

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """Begin an answer to rows of one length [rows][seq], and time their first tokens.

        Caches are allocated before the clock starts. No stop token ends an answer.

        Args:
            ids: token ids.
            steps: how many tokens a row follow the first; a peer that answers in one call makes
                them here.
        """
        ...

    def decode(self) -> Timed:
        """Time the other tokens of the answer begun last."""
        ...


def timed(run: Callable[[], list[list[int]]]) -> Timed:
    """Call once."""
    start = time.perf_counter()
    tokens = run()
    return Timed(time.perf_counter() - start, tokens)
