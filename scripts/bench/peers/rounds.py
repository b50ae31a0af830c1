"""Rounds in which the peers take turns, as many as the time allows."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from trt_lora.scripts.bench.peers.process import PeerAnswer, PeerError

VOCABULARY = 40_000  # ids below it are words of the demo model
_FIRST_WORD = 100
TIMES = DECODE, PROMPT = "decode, tokens/s", "prompt, ms"


class Cell(NamedTuple):
    """One workload: so many rows, each with a prompt of so many tokens."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


# Answered before each turn and not counted: meanwhile the threads of the peer before cease to spin
# (25 ms of ONNX Runtime's), and its memory is given back; the processors are awake.
WARM_UP = Cell(1, 64)
_WARM_UP_SEED = 1_000_000  # other prompts than those of any round: some peers remember them


class Asked(Protocol):
    """What a round asks: a `PeerProcess`."""

    def ask(self, ids: list[list[int]], steps: int, seconds: float) -> PeerAnswer:
        """Have prompts answered."""
        ...


@dataclass
class Results:
    """Answers by peer and cell, and why a peer has no more."""

    answers: dict[str, dict[Cell, list[PeerAnswer]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, others: "Results") -> None:
        """Take in those of another opening of the peers."""
        for name, cells in others.answers.items():
            mine = self.answers.setdefault(name, {})
            for cell, answers in cells.items():
                mine.setdefault(cell, []).extend(answers)
        self.errors |= others.errors

    @property
    def cells(self) -> list[Cell]:
        """Those that were to be answered."""
        return list(next(iter(self.answers.values()), ()))

    def medians(self, cell: Cell, steps: int) -> dict[str, dict[str, float]]:
        """Return what each peer took that has answered, and how many rounds it did."""
        return {
            name: {
                DECODE: cell.batch * steps / statistics.median(a.decode for a in cells[cell]),
                PROMPT: statistics.median(a.prompt for a in cells[cell]) * 1e3,
                "rounds": len(cells[cell]),
            }
            for name, cells in self.answers.items()
            if cells[cell]
        }


@dataclass(frozen=True)
class Rounds:
    """A plan: cells, steps and limits."""

    cells: tuple[Cell, ...]
    steps: int  # tokens a row after the first
    most: int  # rounds of a cell
    deadline: float  # of `time.monotonic`; a round is begun only if its last one's time is left
    answer_seconds: float  # a peer that takes longer is given up

    def run(self, peers: Mapping[str, Asked], tell: Callable[[str], None]) -> Results:
        """Every cell once, then those again that have the fewest rounds, cheapest first.

        A peer that fails is left out from then on; the order of turns changes with the round.
        """
        results = Results({name: {cell: [] for cell in self.cells} for name in peers})
        rounds = dict.fromkeys(self.cells, 0)
        taken = dict.fromkeys(self.cells, 0.0)  # seconds of the last round
        while (cell := self._next(rounds, taken)) is not None:
            start = time.monotonic()
            self._round(cell, rounds[cell], peers, results)
            taken[cell] = time.monotonic() - start
            rounds[cell] += 1
            tell(f"{cell}, round {rounds[cell]}: {taken[cell]:.1f} s")
        return results

    def _next(self, rounds: Mapping[Cell, int], taken: Mapping[Cell, float]) -> Cell | None:
        left = self.deadline - time.monotonic()
        fitting = [c for c in self.cells if rounds[c] < self.most and 0 < left >= taken[c]]
        return min(fitting, key=lambda c: (rounds[c], c.batch * c.context), default=None)

    def _round(self, cell: Cell, number: int, peers: Mapping[str, Asked], results: Results) -> None:
        ids, warm_up = random_prompts(cell, number), random_prompts(WARM_UP, _WARM_UP_SEED + number)
        names = list(peers)
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            if name in results.errors:
                continue
            try:
                peers[name].ask(warm_up, self.steps, self.answer_seconds)
                answer = peers[name].ask(ids, self.steps, self.answer_seconds)
            except PeerError as error:
                results.errors[name] = f"{cell}: {error}"
            else:
                results.answers[name][cell].append(answer)


def random_prompts(cell: Cell, seed: int) -> list[list[int]]:
    """Return token ids [batch][context]; no two rows and no two rounds share a prefix."""
    shape = (cell.batch, cell.context)
    rows: list[list[int]] = (
        np.random.default_rng((seed, *shape)).integers(_FIRST_WORD, VOCABULARY, shape).tolist()
    )
    return rows
