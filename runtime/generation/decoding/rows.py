"""Sequences in rows of the KV cache: prompts in chunks, then one token each at every step."""

from collections import abc

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.ranked_run import RanksLogits
from trt_lora.runtime.generation.decoding.kv_cache import Prefix
from trt_lora.runtime.generation.decoding.ranked_steps import RankedSteps, row_candidates
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.generation.next_tokens import (
    NextTokens,
    RowCandidates,
    RowLogits,
    SeveralRuns,
)
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.store.store import AdapterStore

# Prompts are run together where padding them to one length adds no more than a quarter.
_MOST_PADDING = 1.25
# Fewer tokens than these are run as fast as the row that begins with them is copied.
_LEAST_SHARED = 8

_Chunk = tuple[Sequence, int]  # and how many of its tokens are run


class Rows:
    """The sequences that run, at most one a row.

    A sequence is decoded where its row lacks one token, and before that its prompt is run. A row
    that begins as another one does, with the same adapter and salt, is copied from it or taken over
    instead; only what differs is run. Of equal prompts that come together one is run.

    Where the engine ranks its logits, candidates alone come to the host, and a step may be begun
    ahead.
    """

    def __init__(
        self,
        executor: Executor,
        adapters: AdapterStore,
        rows: int,
        *,
        shares_prefixes: bool = True,
    ) -> None:
        """Allocate the cache.

        Args:
            executor: a running engine.
            adapters: of the engine.
            rows: sequences at a time, most.
            shares_prefixes: rows stay as they are when their sequences end, until others need them.
        """
        self._decoder = StaticDecoder(executor, adapters.bindings.rows([None]), rows)
        self.cache = self._decoder.cache
        self._most_tokens = executor.manifest.max_input_len
        self._adapters, self._shares = adapters, shares_prefixes
        self._bound: TensorMap | None = None  # of the last step
        self.shared_tokens = 0  # of prompts, that were not run
        self._ranker: RanksLogits | None = None
        self._steps: RankedSteps | None = None
        if isinstance(executor, RanksLogits):
            self._ranker = executor
            self._steps = RankedSteps(executor, executor.memory, self.cache)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have a row, in the order of the rows."""
        return [owner for owner in self.cache.owners if isinstance(owner, Sequence)]

    @property
    def waits_for_prompts(self) -> bool:
        """Whether a prompt is not run to its end."""
        return any(map(self._waits, self.sequences))

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in.

        Raises:
            StateError: no row is free.
        """
        self._settle()  # rows may move
        sequence.key = self._key(sequence)
        sequence.slot, sequence.leader = BASE_SLOT, self._leader(sequence)
        source, common = (None, 0) if sequence.leader else self._longest_prefix(sequence)
        self.cache.admit(sequence, source, common)
        self.shared_tokens += common
        sequence.pending = list(sequence.tokens[common:])

    def decode(self, *, ahead: bool = False) -> NextTokens | None:
        """Append its pending token to each sequence whose prompt was run; None if there is none.

        Args:
            ahead: the next step will probably have the greedy token of each of these sequences: it
                may be begun, if no prompt waits. Where it has others after all, it is made anew.
        """
        tokens = {s: s.pending[0] for s in self.sequences if self._is_ready(s)}
        if not tokens:
            return None
        ahead = ahead and len(tokens) == len(self.cache.owners)
        found = self._ranked(tokens, ahead=ahead) if self._steps else self._decoded(tokens)
        for sequence in tokens:
            sequence.pending = []
        return found

    def prefill(self, budget: int | None = None) -> NextTokens | None:
        """Run the next chunk of prompts, the oldest first; return what is found where they end.

        Args:
            budget: tokens of all of them, most; None is the whole of each.
        """
        parts = [part for group in self._groups(budget) if (part := self._run(group)) is not None]
        return parts[0] if len(parts) == 1 else SeveralRuns(tuple(parts)) if parts else None

    def remove(self, sequence: Sequence, *, clear: bool = False, keep: bool = True) -> None:
        """Free a row.

        Args:
            sequence: that has it.
            clear: nothing of it may meet another one's values.
            keep: what it begins with, for others, if rows are free.
        """
        self._settle()  # rows move on another stream
        self._leave_followers(sequence)
        prefix = None
        if keep and not clear and self._shares and sequence.key is not None:
            length = int(self.cache.lengths[self.cache.row_of(sequence)])
            prefix = Prefix(sequence.tokens[:length], sequence.key)
        self.cache.release(sequence, clear=clear, keep=prefix)

    def clear(self) -> None:
        """Free all rows, whatever a step or a removal that did not end has left."""
        if self._steps is not None:
            self._steps.drop()
        self.cache.clear()
        self._bound = None

    def _is_ready(self, sequence: Sequence) -> bool:
        return len(sequence.pending) == 1 and self._length(sequence) > 0

    def _waits(self, sequence: Sequence) -> bool:
        """Whether its prompt is not run to its end."""
        return bool(sequence.pending) and not self._is_ready(sequence)

    def _length(self, sequence: Sequence) -> int:
        return int(self.cache.lengths[self.cache.row_of(sequence)])

    def _settle(self) -> None:
        if self._steps is not None:
            self._steps.settle()

    def _key(self, sequence: Sequence) -> abc.Hashable:
        """What sequences have in common whose rows can be shared."""
        return None if sequence.lease is None else sequence.lease.key, sequence.salt

    def _longest_prefix(self, sequence: Sequence) -> tuple[int | None, int]:
        """The row that begins with most tokens of a sequence, and how many; the last is run."""
        wanted = np.array(sequence.tokens[:-1], np.int64)
        kept = [(row, p.tokens) for row, p in self.cache.prefixes.items() if p.key == sequence.key]
        for row, other in enumerate(self.sequences):
            if self._may_share(sequence, other):
                kept.append((row, other.tokens[: self._length(other)]))
        best: tuple[int | None, int] = (None, 0)
        for row, tokens in kept:
            common = _common(wanted, np.array(tokens, np.int64))
            if common > best[1]:
                best = (row, common)
        return best if best[1] >= min(_LEAST_SHARED, len(wanted)) else (None, 0)

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence of equal tokens whose prompt is run for both."""
        alike = (
            other
            for other in self.sequences
            if other.leader is None
            and self._waits(other)
            and self._may_share(sequence, other)
            and other.tokens == sequence.tokens
        )
        return next(alike, None)

    def _may_share(self, sequence: Sequence, other: Sequence) -> bool:
        """Answers to one prompt always do."""
        return other.key == sequence.key and (self._shares or other.prompt is sequence.prompt)

    def _followers(self, sequence: Sequence) -> list[Sequence]:
        return [other for other in self.sequences if other.leader is sequence]

    def _lead(self, sequence: Sequence) -> None:
        """Copy the row of a prompt that was run, but for its last token, to those that wait."""
        for follower in self._followers(sequence):
            rows = self.cache.row_of(sequence), self.cache.row_of(follower)
            self.cache.copy_row(*rows)
            self.cache.lengths[rows[1]] = len(follower.tokens) - 1
            self.shared_tokens += len(follower.tokens) - 1
            follower.leader, follower.pending = None, [follower.tokens[-1]]

    def _leave_followers(self, sequence: Sequence) -> None:
        """Hand the prompt of a sequence that leaves to the first of those that wait for it."""
        followers = self._followers(sequence)
        if followers:
            heir, *others = followers
            self.cache.copy_row(self.cache.row_of(sequence), self.cache.row_of(heir))
            heir.leader, heir.pending = None, list(sequence.pending)
            for other in others:
                other.leader = heir

    def _ranked(self, tokens: dict[Sequence, int], *, ahead: bool) -> NextTokens:
        assert self._steps is not None
        if unbound := [s for s in tokens if s.lease is not None and s.slot == BASE_SLOT]:
            self._bind(unbound)
        return self._steps.run(
            tokens,
            {s: s.temperature for s in tokens},
            self._decoder.adapter,
            ahead=ahead,
            slots={s: s.slot for s in tokens},
        )

    def _decoded(self, tokens: dict[Sequence, int]) -> NextTokens:
        """One token for each row up to the last one named; an idle row in between stays as it was.

        What is written behind its length is overwritten by its own next token.
        """
        places = {self.cache.row_of(s): s for s in tokens}
        count = max(places) + 1
        ids = np.zeros(count, np.int64)
        for place, sequence in places.items():
            ids[place] = tokens[sequence]
        rows = None if len(places) == count else np.array(sorted(places))
        self._bind([places.get(place) for place in range(count)])
        logits = self._decoder.decode(ids, rows=rows)
        return RowLogits(tuple(places[place] for place in sorted(places)), logits)

    def _bind(self, sequences: abc.Sequence[Sequence | None]) -> None:
        """Give each row of the next run its adapter; None is a row that is idle."""
        step = self._adapters.bindings.rows([None if s is None else s.lease for s in sequences])
        if step is not self._bound:
            self._decoder.use_adapter(step)
            self._bound = step
        if self._steps is not None and LORA_SLOT in step:
            for sequence, slot in zip(sequences, step[LORA_SLOT].numpy().tolist(), strict=True):
                if sequence is not None:
                    sequence.slot = slot

    def _run(self, group: list[_Chunk]) -> NextTokens | None:
        """Run chunks of neighbouring rows; return what is found for those whose prompt ends."""
        sequences = [sequence for sequence, _ in group]
        new = np.array([count for _, count in group])
        ids = np.zeros((len(group), int(new.max())), np.int64)
        for padded, (sequence, count) in zip(ids, group, strict=True):
            padded[:count] = sequence.pending[:count]
        self._bind(sequences)
        first = self.cache.row_of(sequences[0])
        logits = self._decoder.execute(ids, first=first, new=new)
        for sequence, count in group:
            del sequence.pending[:count]
            if len(sequence.pending) <= 1:
                self._lead(sequence)
        ended = np.array([not sequence.pending for sequence in sequences])
        return self._found(sequences, logits).only(ended) if ended.any() else None

    def _found(
        self, sequences: abc.Sequence[Sequence], logits: Tensor
    ) -> RowLogits | RowCandidates:
        """What logits [n, vocab] are for n sequences."""
        if self._ranker is None:
            return RowLogits(tuple(sequences), logits.numpy().astype(np.float32, copy=False))
        temperatures = np.array([s.temperature for s in sequences], np.float64)
        found = self._ranker.rank(logits, temperatures)
        return row_candidates(found, {s: place for place, s in enumerate(sequences)})

    def _groups(self, budget: int | None) -> abc.Iterator[list[_Chunk]]:
        """Chunks that run together: of neighbouring new rows, of similar length."""
        group: list[_Chunk] = []
        for chunk in sorted(self._chunks(budget), key=lambda chunk: self.cache.row_of(chunk[0])):
            if group and not self._fits([*group, chunk]):
                yield group
                group = []
            group.append(chunk)
        if group:
            yield group

    def _chunks(self, budget: int | None) -> abc.Iterator[_Chunk]:
        """The next chunk of each prompt within the budget, the oldest first; never none."""
        left = budget
        waiting = [s for s in self.sequences if s.leader is None and self._waits(s)]
        for sequence in sorted(waiting, key=lambda s: s.id):
            count = min(len(sequence.pending), self._most_tokens)
            if budget is not None and left is not None:
                count = min(count, budget)
                if count > left:
                    return
                left -= count
            yield sequence, count

    def _fits(self, group: list[_Chunk]) -> bool:
        places = [self.cache.row_of(sequence) for sequence, _ in group]
        counts = [count for _, count in group]
        are_neighbours = places == list(range(places[0], places[0] + len(places)))
        is_new = not self.cache.lengths[places].any()
        return (
            are_neighbours and is_new and max(counts) * len(counts) <= _MOST_PADDING * sum(counts)
        )


def _common(one: Ids, other: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    count = min(one.size, other.size)
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if differ.size else count
