"""Sequences in rows of the KV cache: prompts in chunks, then one token each at every step."""

from collections import abc
from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT
from trt_lora.runtime.engines.engine import EngineExecutor, Executor, encoder_of
from trt_lora.runtime.generation.chosen_tokens import ChosenToken, StepOutput
from trt_lora.runtime.generation.decoding.decode_steps import Group, RowInput
from trt_lora.runtime.generation.decoding.kv_cache import Prefix
from trt_lora.runtime.generation.decoding.source_encoder import SourceEncoder
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.generation.logits.logprobs import logprobs_of
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.generation.token import Logprobs
from trt_lora.runtime.memory.tensor import HOST, TensorMap
from trt_lora.runtime.store.store import AdapterStore

# Prompts are run together where padding them to one length adds no more than a quarter.
_MOST_PADDING = 1.25
# Fewer tokens than these are run as fast as the row that begins with them is copied.
_LEAST_SHARED = 8
# Tokens of a prompt that are run at a time where each has log probabilities: as many rows of logits
# are in memory, 13 MB of a vocabulary of 49,152.
_MOST_KEPT = 64

_Chunk = tuple[Sequence, int]  # and how many of its tokens are run


@dataclass
class RowCounts:
    """What has happened in rows so far, in tokens."""

    asked: int = 0  # that sequences began with
    shared: int = 0  # of those that were not run: other sequences had begun with them
    prompts: int = 0  # of those that were
    decoded: int = 0  # of answers, that were run
    preempted: int = 0  # times that a sequence has lost its row


class Rows:
    """The sequences that run, at most one a row.

    A sequence is decoded where its row lacks one token, and before that its prompt is run. A row
    that begins as another one does, with the same adapter and salt, is copied from it or taken over
    instead; only what differs is run. Of equal prompts that come together one is run.

    A sequence that asks for log probabilities of its prompt runs all of it, by itself and in small
    chunks; those of the same request share them.
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
        self.counts = RowCounts()
        encoder, part = encoder_of(executor), executor.manifest.encoder
        self._sources: SourceEncoder | None = None
        if encoder is not None and part is not None:
            self._sources = SourceEncoder(encoder, part, self.cache, adapters.bindings)
        self._executor = executor
        self._has_slots = adapters.bindings.slot_count is not None
        # On a GPU every step binds all slots, and a sequence keeps its own.
        self._binds_each_step = not self._has_slots or executor.memory.device == HOST

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have a row, in the order of the rows."""
        return [owner for owner in self.cache.owners if isinstance(owner, Sequence)]

    @property
    def waiting(self) -> list[int]:
        """How many tokens are to be run of each prompt that is not run to its end."""
        waiting = [s for s, length in self._filled() if _waits(s, length)]
        return [len(s.pending) if s.leader is None else 1 for s in waiting]

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in.

        Raises:
            StateError: no row is free.
        """
        self._decoder.steps.settle()  # rows may move
        sequence.key = self._key(sequence)
        is_asked = sequence.sampling.prompt_logprobs is not None and not sequence.answer
        sequence.prompt_logprobs = [None] if is_asked else None
        sequence.slot, sequence.leader = BASE_SLOT, self._leader(sequence)
        is_run = is_asked or sequence.leader is not None
        source, common = (None, 0) if is_run else self._longest_prefix(sequence)
        self.cache.admit(sequence, source, common)
        self.counts.asked += len(sequence.tokens)
        self.counts.shared += common
        sequence.pending = list(sequence.tokens[common:])
        sequence.is_encoded = common > 0  # the row came with that of the same source

    def warm_up(self) -> None:
        """Let a device compile, load and capture what steps launch; no sequence has a row."""
        if not self._decoder.steps.overlap:
            return
        self._decoder.steps.warm_up(self._decoder.adapter)
        if isinstance(self._executor, EngineExecutor):
            self._executor.warm_up()

    def decode(self) -> list[StepOutput]:
        """Append its pending token to each sequence whose prompt was run.

        If all do, and are known to have their greedy token next, a device may begin the next step.
        """
        tokens = {s: s.pending[0] for s, length in self._filled() if _is_ready(s, length)}
        if not tokens:
            return []
        steps = self._decoder.steps
        ahead = steps.overlap and self._are_all(tokens) and all(map(_is_known_to_go_on, tokens))
        found = steps.run([*map(self._group, self._by_adapter(tokens))], ahead=ahead)
        for sequence in tokens:
            sequence.pending = []
        self.counts.decoded += len(tokens)
        return found

    def launch_next(self, chosen: abc.Sequence[ChosenToken]) -> None:
        """Let a device begin the step of tokens that were just chosen, if all sequences go on."""
        if self._decoder.steps.may_launch:
            tokens = {each.sequence: each.token for each in chosen if not each.is_last}
            groups = self._by_adapter(tokens)
            if self._are_all(tokens) and len(groups) == 1:
                self._decoder.steps.launch_next(self._group(tokens))

    def prefill(self, budget: int) -> list[StepOutput]:
        """Run the next chunk of prompts, the oldest first; return what is found where they end.

        Args:
            budget: tokens of all of them, most.
        """
        groups = [*self._groups(budget)]
        self._encode([sequence for group in groups for sequence, _ in group])
        found = [self._run(group) for group in groups]
        return [output for output in found if output is not None]

    def remove(self, sequence: Sequence, *, clear: bool = False) -> None:
        """Free a row; what it begins with is kept for others, if rows are free.

        Args:
            sequence: that has it.
            clear: nothing of it may meet another one's values.
        """
        self._decoder.steps.settle()  # rows move on another stream
        self._leave_followers(sequence)
        prefix = None
        if not clear and self._shares:
            length = int(self.cache.lengths[self.cache.row_of(sequence)])
            prefix = Prefix(sequence.tokens[:length], sequence.key)
        self.cache.release(sequence, clear=clear, keep=prefix)

    def clear(self) -> None:
        """Free all rows, whatever a step or a removal that did not end has left."""
        self._decoder.steps.drop()
        self.cache.clear()
        self._bound = None

    def _filled(self) -> abc.Iterator[tuple[Sequence, int]]:
        """The sequences, and how many tokens are in the row of each."""
        return zip(self.sequences, self.cache.lengths.tolist(), strict=False)

    def _key(self, sequence: Sequence) -> abc.Hashable:
        """What sequences have in common whose rows can be shared."""
        key = (None if sequence.lease is None else sequence.lease.key, sequence.salt)
        return key if sequence.source is None else (*key, sequence.source.tobytes())

    def _longest_prefix(self, sequence: Sequence) -> tuple[int | None, int]:
        """The row that begins with most tokens of a sequence, and how many; the last is run."""
        wanted = np.array(sequence.tokens[:-1], np.int64)
        kept = [(row, p.tokens) for row, p in self.cache.prefixes.items() if p.key == sequence.key]
        for row, (other, length) in enumerate(self._filled()):
            if self._may_share(sequence, other):
                kept.append((row, other.tokens[:length]))
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
            for other, length in self._filled()
            if other.leader is None
            and _waits(other, length)
            and self._may_share(sequence, other)
            and other.tokens == sequence.tokens
        )
        return next(alike, None)

    def _may_share(self, sequence: Sequence, other: Sequence) -> bool:
        """Answers to one prompt always do, and no others where it has log probabilities."""
        is_same = other.prompt is sequence.prompt
        if sequence.prompt_logprobs is None:
            return other.key == sequence.key and (self._shares or is_same)
        return other.key == sequence.key and is_same and other.prompt_logprobs is not None

    def _followers(self, sequence: Sequence) -> list[Sequence]:
        return [other for other in self.sequences if other.leader is sequence]

    def _lead(self, sequence: Sequence) -> None:
        """Copy the row of a prompt that was run, but for its last token, to those that wait."""
        for follower in self._followers(sequence):
            rows = self.cache.row_of(sequence), self.cache.row_of(follower)
            self.cache.copy_row(*rows)
            self.cache.lengths[rows[1]] = len(follower.tokens) - 1
            self.counts.shared += len(follower.tokens) - 1
            follower.leader, follower.pending = None, [follower.tokens[-1]]
            follower.is_encoded = sequence.is_encoded
            if follower.prompt_logprobs is not None:
                follower.prompt_logprobs = sequence.prompt_logprobs

    def _leave_followers(self, sequence: Sequence) -> None:
        """Hand the prompt of a sequence that leaves to the first of those that wait for it."""
        followers = self._followers(sequence)
        if followers:
            heir, *others = followers
            self.cache.copy_row(self.cache.row_of(sequence), self.cache.row_of(heir))
            heir.leader, heir.pending = None, list(sequence.pending)
            heir.is_encoded = sequence.is_encoded
            if heir.prompt_logprobs is not None:
                heir.prompt_logprobs = sequence.prompt_logprobs
            for other in others:
                other.leader = heir

    def _are_all(self, tokens: abc.Collection[Sequence]) -> bool:
        return 0 < len(tokens) == len(self.cache.owners)

    def _by_adapter(self, tokens: abc.Mapping[Sequence, int]) -> list[dict[Sequence, int]]:
        """The sequences that a run can take together: with slots all, otherwise of one adapter."""
        sequences = list(tokens)
        groups = self._adapters.bindings.groups([sequence.lease for sequence in sequences])
        return [{sequences[place]: tokens[sequences[place]] for place in group} for group in groups]

    def _group(self, tokens: abc.Mapping[Sequence, int]) -> Group:
        """Sequences that are run together; between their rows others may be idle."""
        places = {row: s for row, s in enumerate(self.sequences) if s in tokens}
        if self._binds_each_step or not all(map(_has_slot, tokens)):
            self._bind([places.get(place) for place in range(min(places), max(places) + 1)])
        rows = {s: RowInput(row, tokens[s], s.temperature, s.slot) for row, s in places.items()}
        return Group(rows, self._decoder.adapter)

    def _bind(self, sequences: abc.Sequence[Sequence | None]) -> None:
        """Give each row of the next run its adapter; None is a row that is idle."""
        if not self._has_slots:  # an idle row may have any
            sequences = [sequence for sequence in sequences if sequence is not None]
        step = self._adapters.bindings.rows([None if s is None else s.lease for s in sequences])
        if step is not self._bound:
            self._decoder.use_adapter(step)
            self._bound = step
        if LORA_SLOT in step:
            for sequence, slot in zip(sequences, step[LORA_SLOT].numpy().tolist(), strict=True):
                if sequence is not None:
                    sequence.slot = slot

    def _encode(self, sequences: abc.Iterable[Sequence]) -> None:
        """Fill the cross caches of rows that lack them, before the first tokens are run."""
        if self._sources is None:
            return
        self._decoder.steps.settle()  # the encoder works on another stream
        for sequence in sequences:
            if not sequence.is_encoded:
                self._sources.encode(sequence)
                sequence.is_encoded = True

    def _run(self, group: list[_Chunk]) -> StepOutput | None:
        """Run chunks of neighbouring rows; return what is found for those whose prompt ends."""
        sequences = [sequence for sequence, _ in group]
        if sequences[0].prompt_logprobs is not None:
            return self._run_with_logprobs(*group[0], sequences[0].prompt_logprobs)
        new = np.array([count for _, count in group])
        ids = np.zeros((len(group), int(new.max())), np.int64)
        for padded, (sequence, count) in zip(ids, group, strict=True):
            padded[:count] = sequence.pending[:count]
        self._bind(sequences)
        first = self.cache.row_of(sequences[0])
        logits = self._decoder.execute(ids, first=first, new=new)
        for sequence, count in group:
            self._advance(sequence, count)
        ended = np.array([not sequence.pending for sequence in sequences])
        if not ended.any():
            return None
        temperatures = np.array([sequence.temperature for sequence in sequences], np.float64)
        found = self._executor.topk(logits, temperatures)
        return StepOutput(tuple(sequences), found).select(ended)

    def _run_with_logprobs(
        self, sequence: Sequence, count: int, known: list[Logprobs | None]
    ) -> StepOutput | None:
        """Run a chunk of a prompt, and note the log probabilities of what follows each token."""
        ids, following = np.array([sequence.pending[:count]]), sequence.pending[1 : count + 1]
        self._bind([sequence])
        row = self.cache.row_of(sequence)
        logits = self._decoder.execute(ids, first=row, kept=np.arange(count))
        is_end = len(following) < count  # the last token's logits are the answer's
        temperatures = np.ones(count)
        temperatures[-1] = sequence.temperature if is_end else 1
        found = self._executor.topk(logits, temperatures)
        if (wrong := np.flatnonzero(~found.is_finite())).size:
            return StepOutput((sequence,), found.select(wrong[:1].tolist()))
        counts = [sequence.sampling.prompt_logprobs] * len(following) + [None] * is_end
        tokens = np.array([*following, *[0] * is_end])
        known += logprobs_of(found, tokens, counts)[: len(following)]
        self._advance(sequence, count)
        return StepOutput((sequence,), found.select([count - 1])) if is_end else None

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Note that tokens of a prompt were run."""
        del sequence.pending[:count]
        self.counts.prompts += count
        if len(sequence.pending) <= 1:
            self._lead(sequence)

    def _groups(self, budget: int) -> abc.Iterator[list[_Chunk]]:
        """Chunks that run together: of neighbouring new rows, of similar length."""
        group: list[_Chunk] = []
        for chunk in sorted(self._chunks(budget), key=lambda chunk: self.cache.row_of(chunk[0])):
            if group and not self._fits([*group, chunk]):
                yield group
                group = []
            group.append(chunk)
        if group:
            yield group

    def _chunks(self, budget: int) -> abc.Iterator[_Chunk]:
        """The next chunk of each prompt within the budget, the oldest first; never none."""
        left = budget
        waiting = [s for s, length in self._filled() if s.leader is None and _waits(s, length)]
        for sequence in sorted(waiting, key=lambda s: s.id):
            most = self._most_tokens if sequence.prompt_logprobs is None else _MOST_KEPT
            count = min(len(sequence.pending), self._most_tokens, most, budget)
            if count > left:
                return
            left -= count
            yield sequence, count

    def _fits(self, group: list[_Chunk]) -> bool:
        places = [self.cache.row_of(sequence) for sequence, _ in group]
        counts = [count for _, count in group]
        if any(sequence.prompt_logprobs is not None for sequence, _ in group):
            return len(group) == 1
        leases = [sequence.lease for sequence, _ in group]
        if len(self._adapters.bindings.groups(leases)) > 1:
            return False
        are_neighbours = places == list(range(places[0], places[0] + len(places)))
        is_new = not self.cache.lengths[places].any()
        return (
            are_neighbours and is_new and max(counts) * len(counts) <= _MOST_PADDING * sum(counts)
        )


def _is_ready(sequence: Sequence, length: int) -> bool:
    return len(sequence.pending) == 1 and length > 0


def _waits(sequence: Sequence, length: int) -> bool:
    """Whether its prompt is not run to its end."""
    return bool(sequence.pending) and not _is_ready(sequence, length)


def _is_known_to_go_on(sequence: Sequence) -> bool:
    """Whether its next token is the first candidate, and not its last by length."""
    return sequence.is_greedy and sequence.left > 1


def _has_slot(sequence: Sequence) -> bool:
    """Whether the slot of its adapter is known, which stays the same on a device."""
    return sequence.lease is None or sequence.slot != BASE_SLOT


def _common(one: Ids, other: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    count = min(one.size, other.size)
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if differ.size else count
