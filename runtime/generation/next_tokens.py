"""The next tokens of sequences, chosen from logits on the host or from candidates of a GPU."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.generation.candidates import Candidates
from trt_lora.runtime.generation.sampling import (
    UNDECIDED,
    Draws,
    Logits,
    SamplingParams,
    Tokens,
    choose,
    draw,
)
from trt_lora.runtime.memory.tensor import Tensor

Chosen = npt.NDArray[np.bool_]  # [n], which of the sequences


class NextTokens(Protocol):
    """What a step has found for n sequences; it is looked at before the next step."""

    @property
    def rows(self) -> tuple[Hashable, ...]:
        """The sequences [n]."""
        ...

    def are_numbers(self) -> Chosen:
        """Return which have logits that are all finite [n]."""
        ...

    def only(self, which: Chosen) -> "NextTokens":
        """Return those of some of the sequences."""
        ...

    def choose(self, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
        """Return one token of each [n], all of which have numbers; see `sampling.choose`."""
        ...


@dataclass(frozen=True)
class RowLogits:
    """Logits [n, vocab] of the next token of n sequences."""

    rows: tuple[Hashable, ...]
    logits: Logits

    def are_numbers(self) -> Chosen:
        """See `NextTokens`; NaN and infinity show in the maximum or the minimum."""
        greatest, least = self.logits.max(axis=-1), self.logits.min(axis=-1)
        return np.asarray(np.isfinite(greatest) & np.isfinite(least), np.bool_)

    def only(self, which: Chosen) -> "RowLogits":
        """See `NextTokens`."""
        return RowLogits(_only(self.rows, which), self.logits[which])

    def choose(self, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
        """See `NextTokens`."""
        return choose(self.logits, sampling, draws)


@dataclass(frozen=True)
class RowCandidates:
    """Candidates of n sequences; their logits are on a GPU, from where few are ever fetched."""

    rows: tuple[Hashable, ...]
    candidates: Candidates
    numbers: Chosen  # [n]
    logits: tuple[Tensor, ...]  # [vocab] of each

    def are_numbers(self) -> Chosen:
        """See `NextTokens`."""
        return self.numbers

    def only(self, which: Chosen) -> "RowCandidates":
        """See `NextTokens`."""
        found = self.candidates
        kept = Candidates(
            found.tokens[which], found.logits[which], found.totals[which], found.vocabulary
        )
        logits = tuple(t for t, is_kept in zip(self.logits, which, strict=True) if is_kept)
        return RowCandidates(_only(self.rows, which), kept, self.numbers[which], logits)

    def choose(self, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
        """See `NextTokens`; the logits of a row come to the host where its candidates are few."""
        if not any(params.temperature for params in sampling):
            return self.candidates.tokens[:, 0].astype(np.int64)
        tokens = draw(self.candidates, sampling, draws)
        for place in map(int, np.flatnonzero(tokens == UNDECIDED)):
            logits = self.logits[place].numpy().astype(np.float32, copy=False)[None]
            tokens[place] = choose(logits, [sampling[place]], draws[[place]])[0]
        return tokens


@dataclass(frozen=True)
class SeveralRuns:
    """What the runs of one step have found."""

    parts: tuple[NextTokens, ...]

    @property
    def rows(self) -> tuple[Hashable, ...]:
        """See `NextTokens`."""
        return tuple(row for part in self.parts for row in part.rows)

    def are_numbers(self) -> Chosen:
        """See `NextTokens`."""
        return np.concatenate([np.zeros(0, np.bool_), *(p.are_numbers() for p in self.parts)])

    def only(self, which: Chosen) -> "SeveralRuns":
        """See `NextTokens`."""
        pairs = zip(self.parts, self._places(), strict=True)
        return SeveralRuns(tuple(part.only(which[mine]) for part, mine in pairs))

    def choose(self, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
        """See `NextTokens`."""
        found = [
            part.choose(sampling[mine], draws[mine])
            for part, mine in zip(self.parts, self._places(), strict=True)
            if part.rows
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _places(self) -> list[slice]:
        """Where each part is among all."""
        ends = itertools.accumulate(len(part.rows) for part in self.parts)
        return list(itertools.starmap(slice, itertools.pairwise((0, *ends))))


def _only(rows: tuple[Hashable, ...], which: Chosen) -> tuple[Hashable, ...]:
    return tuple(row for row, is_kept in zip(rows, which, strict=True) if is_kept)
