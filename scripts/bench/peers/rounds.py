"""Rounds in which the peers take turns, as many as the time allows."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows
from trt_lora.scripts.bench.peers.process import PeerError

VOCABULARY = 40_000  # ids below it are words of the demo model
_FIRST_WORD = 100
TIMES = DECODE, PROMPT = "decode, tokens/s", "prompt, ms"


class Cell(NamedTuple):
    """One workload: its rows, and the tokens of each one's prompt."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"

    def prompts(self, seed: int) -> Rows:
        """Return token ids [batch][context]; no two rows and no two rounds share a prefix."""
        rng = np.random.default_rng((seed, *self))
        rows: Rows = rng.integers(_FIRST_WORD, VOCABULARY, tuple(self)).tolist()
        return rows


# Answered before each turn and not counted: meanwhile the threads of the peer before cease to spin
# (25 ms of ONNX Runtime's), and its memory is given back; the processors are awake.
WARM_UP = Cell(1, 64)
_WARM_UP_SEED = 1_000_000  # other prompts than those of any round: some peers remember them


class PeerClient(Protocol):
    """What a round asks: a `PeerProcess`."""

    def ask(self, ids: Rows, steps: int, seconds: float) -> PeerAnswer:
        """Have prompts answered."""
        ...


@dataclass(frozen=True)
class Results:
    """Answers by cell and peer, and why a peer has no more."""

    answers: Mapping[Cell, dict[str, list[PeerAnswer]]]
    errors: dict[str, str] = field(default_factory=dict)

    def medians(self, cell: Cell, steps: int) -> dict[str, dict[str, float]]:
        """Return what each peer took that has answered, and how many rounds it did."""
        return {
            name: {
                DECODE: cell.batch * steps / statistics.median(a.decode for a in answers),
                PROMPT: statistics.median(a.prompt for a in answers) * 1e3,
                "rounds": len(answers),
            }
            for name, answers in self.answers[cell].items()
        }


@dataclass(frozen=True)
class Rounds:
    """A plan: steps and limits."""

    steps: int  # tokens a row after the first
    most: int  # rounds of a cell
    deadline: float  # of `time.monotonic`; a round is begun only if its last one's time is left
    answer_seconds: float  # a peer that takes longer is given up

    def run(
        self, peers: Mapping[str, PeerClient], results: Results, log: Callable[[str], None]
    ) -> None:
        """Add the answers to every cell of the results, cheapest first, then to every one again.

        A peer that fails is left out from then on; the order of turns changes with the round.
        """
        cells = sorted(results.answers, key=lambda cell: cell.batch * cell.context)
        taken = dict.fromkeys(cells, 0.0)  # seconds of the last round
        left = dict(peers)
        for number in range(self.most):
            for cell in cells:
                start = time.monotonic()
                if not 0 < self.deadline - start >= taken[cell]:
                    continue
                first = number % max(len(peers), 1)
                for name in [*peers, *peers][first : first + len(peers)]:
                    if name in left and not self._answered(left[name], name, cell, number, results):
                        del left[name]
                taken[cell] = time.monotonic() - start
                log(f"{cell}, round {number + 1}: {taken[cell]:.1f} s")

    def _answered(
        self, peer: PeerClient, name: str, cell: Cell, number: int, results: Results
    ) -> bool:
        try:
            peer.ask(WARM_UP.prompts(_WARM_UP_SEED + number), self.steps, self.answer_seconds)
            answer = peer.ask(cell.prompts(number), self.steps, self.answer_seconds)
        except PeerError as error:
            results.errors[name] = f"{cell}: {error}"
            return False
        results.answers[cell].setdefault(name, []).append(answer)
        return True
