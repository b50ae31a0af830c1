"""The next tokens of sequences, chosen from logits on the host or from candidates of a GPU."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.generation.candidates import Candidates
from trt_lora.runtime.generation.logits.logprobs import logprobs_of_candidates, logprobs_of_row
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import (
    UNDECIDED,
    Keys,
    Logits,
    Tokens,
    choose,
    choose_beyond,
    draw,
)
from trt_lora.runtime.generation.token import Logprobs
from trt_lora.runtime.memory.tensor import Tensor

Chosen = npt.NDArray[np.bool_]  # [n], which of the sequences
Process = Callable[[Logits], Logits]  # a sequence's bias, penalties and grammar, on all its logits
Processes = Sequence[Process | None]  # [n], None where its tokens are chosen from raw logits


class NextTokens(Protocol):
    """What a step has found for n sequences; it is looked at before the next step."""

    @property
    def rows(self) -> tuple[Any, ...]:
        """The sequences [n]."""
        ...

    def are_numbers(self) -> Chosen:
        """Return which have logits that are all finite [n]."""
        ...

    def only(self, which: Chosen) -> "NextTokens":
        """Return those of some of the sequences."""
        ...

    def choose(
        self, sampling: Sequence[SamplingParams], keys: Keys, processes: Processes = ()
    ) -> Tokens:
        """Return one token of each [n], all of which have numbers; see `sampling.choose`.

        `UNDECIDED` is where its process has left no token to choose.
        """
        ...

    def logprobs(self, tokens: Tokens, sampling: Sequence[SamplingParams]) -> list[Logprobs | None]:
        """Return the log probabilities of each [n] that asks for them; `tokens` are the chosen."""
        ...


@dataclass(frozen=True)
class RowLogits:
    """Logits [n, vocab] of the next token of n sequences."""

    rows: tuple[Any, ...]
    logits: Logits

    def are_numbers(self) -> Chosen:
        """See `NextTokens`; NaN and infinity show in the maximum or the minimum."""
        greatest, least = self.logits.max(axis=-1), self.logits.min(axis=-1)
        return np.asarray(np.isfinite(greatest) & np.isfinite(least), np.bool_)

    def only(self, which: Chosen) -> "RowLogits":
        """See `NextTokens`."""
        return RowLogits(_only(self.rows, which), self.logits[which])

    def named(self, rows: Sequence[Any], places: Sequence[int]) -> "RowLogits":
        """Return what is found at some places, as that of other rows."""
        return RowLogits(tuple(rows), self.logits[list(places)])

    def choose(
        self, sampling: Sequence[SamplingParams], keys: Keys, processes: Processes = ()
    ) -> Tokens:
        """See `NextTokens`."""
        if not any(processes):
            return choose(self.logits, sampling, keys)
        pairs = zip(self.logits, processes, strict=True)
        changed = [row if process is None else process(row) for row, process in pairs]
        return choose(np.stack(changed), sampling, keys)

    def logprobs(self, tokens: Tokens, sampling: Sequence[SamplingParams]) -> list[Logprobs | None]:
        """See `NextTokens`."""
        return [
            None if params.logprobs is None else logprobs_of_row(row, int(token), params.logprobs)
            for row, token, params in zip(self.logits, tokens, sampling, strict=True)
        ]


@dataclass(frozen=True)
class RowCandidates:
    """Candidates of n sequences; their logits are on a GPU, from where few are ever fetched."""

    rows: tuple[Any, ...]
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

    def named(self, rows: Sequence[Any], places: Sequence[int]) -> "RowCandidates":
        """Return what is found at some places, as that of other rows."""
        at, found = list(places), self.candidates
        some = Candidates(found.tokens[at], found.logits[at], found.totals[at], found.vocabulary)
        logits = tuple(self.logits[place] for place in at)
        return RowCandidates(tuple(rows), some, self.numbers[at], logits)

    def choose(
        self, sampling: Sequence[SamplingParams], keys: Keys, processes: Processes = ()
    ) -> Tokens:
        """See `NextTokens`.

        The logits of a row come to the host where they are changed, or its candidates are few.
        """
        if not any(processes) and not any(params.temperature for params in sampling):
            return self.candidates.tokens[:, 0].astype(np.int64)
        tokens = draw(self.candidates, sampling, keys)
        for place, process in enumerate(processes or [None] * len(tokens)):
            if process is None and tokens[place] != UNDECIDED:
                continue
            one, logits = slice(place, place + 1), self._whole(place)
            if process is None:
                known = self.candidates.tokens[place]
                tokens[place] = choose_beyond(logits, sampling[place], keys[place], known)
            else:
                tokens[place] = choose(process(logits)[None], sampling[one], keys[one])[0]
        return tokens

    def logprobs(self, tokens: Tokens, sampling: Sequence[SamplingParams]) -> list[Logprobs | None]:
        """See `NextTokens`; a row's logits come to the host where its candidates do not tell."""
        return [
            None if params.logprobs is None else self._logprobs(place, int(token), params)
            for place, (token, params) in enumerate(zip(tokens, sampling, strict=True))
        ]

    def _logprobs(self, place: int, token: int, params: SamplingParams) -> Logprobs:
        found, count, known = self.candidates, params.logprobs or 0, None
        if params.temperature in (0, 1):  # the totals are those of temperature 1
            known = logprobs_of_candidates(
                found.tokens[place], found.logits[place], found.totals[place], token, count
            )
        return known or logprobs_of_row(self._whole(place), token, count)

    def _whole(self, place: int) -> Logits:
        """All logits [vocab] of a row, on the host."""
        return self.logits[place].numpy().astype(np.float32, copy=False)


@dataclass(frozen=True)
class SeveralRuns:
    """What the runs of one step have found."""

    parts: tuple[NextTokens, ...]

    @property
    def rows(self) -> tuple[Any, ...]:
        """See `NextTokens`."""
        return tuple(row for part in self.parts for row in part.rows)

    def are_numbers(self) -> Chosen:
        """See `NextTokens`."""
        return np.concatenate([np.zeros(0, np.bool_), *(p.are_numbers() for p in self.parts)])

    def only(self, which: Chosen) -> "SeveralRuns":
        """See `NextTokens`."""
        pairs = zip(self.parts, self._places(), strict=True)
        return SeveralRuns(tuple(part.only(which[mine]) for part, mine in pairs))

    def choose(
        self, sampling: Sequence[SamplingParams], keys: Keys, processes: Processes = ()
    ) -> Tokens:
        """See `NextTokens`."""
        found = [
            part.choose(sampling[mine], keys[mine], processes[mine])
            for part, mine in zip(self.parts, self._places(), strict=True)
            if part.rows
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def logprobs(self, tokens: Tokens, sampling: Sequence[SamplingParams]) -> list[Logprobs | None]:
        """See `NextTokens`."""
        pairs = zip(self.parts, self._places(), strict=True)
        return [one for part, at in pairs for one in part.logprobs(tokens[at], sampling[at])]

    def _places(self) -> list[slice]:
        """Where each part is among all."""
        ends = itertools.accumulate(len(part.rows) for part in self.parts)
        return list(itertools.starmap(slice, itertools.pairwise((0, *ends))))


def _only(rows: tuple[Any, ...], which: Chosen) -> tuple[Any, ...]:
    return tuple(row for row, is_kept in zip(rows, which, strict=True) if is_kept)
