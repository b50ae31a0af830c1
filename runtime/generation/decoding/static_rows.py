"""Sequences in a static KV cache: they join and leave at any step."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from trt_lora.plugins.contract.slots import LORA_SLOT
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.ranked_run import RanksLogits
from trt_lora.runtime.generation.decoding.ranked_steps import RankedSteps, row_candidates
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.next_tokens import (
    NextTokens,
    RowCandidates,
    RowLogits,
    SeveralRuns,
)
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

# Prompts are run together where padding them to one length adds no more than a quarter.
_MOST_PADDING = 1.25


class StaticRows:
    """`Rows` of an engine whose cache is written in place.

    Where the engine ranks its logits, candidates alone come to the host, and a step may be begun
    ahead.
    """

    def __init__(
        self,
        executor: Executor,
        tensor_map: TensorMap,
        rows: int,
        prefill_chunk: int,
        adapters: SlotAdapters | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            executor: a running engine.
            tensor_map: holds the engine's LoRA bindings.
            rows: sequences at a time, most.
            prefill_chunk: tokens of a prompt that one step runs, most.
            adapters: of the sequences, where each has its own.
        """
        self._decoder = StaticDecoder(executor, tensor_map, rows)
        self._cache = self._decoder.cache
        self._chunk = prefill_chunk
        self._waiting: dict[Hashable, list[int]] = {}  # what is left of prompts
        self._copies: dict[Hashable, list[Hashable]] = {}  # rows that wait for another one's prompt
        self._prompts: dict[Hashable, int] = {}  # how long they are
        self._temperatures: dict[Hashable, float] = {}
        self._adapters, self._leases = adapters, dict[Hashable, Lease | None]()
        self._bound: TensorMap | None = None  # of the last step, where sequences have their own
        self._slots: dict[Hashable | None, int] = {}  # an adapter in use stays in its slot
        self._ranker: RanksLogits | None = None
        self._steps: RankedSteps | None = None
        if isinstance(executor, RanksLogits):
            self._ranker = executor
            self._steps = RankedSteps(executor, executor.memory, self._cache)

    def add(
        self,
        row: Hashable,
        prompt: Sequence[int],
        *,
        temperature: float = 0.0,
        adapter: Lease | None = None,
        copy_of: Hashable | None = None,
    ) -> None:
        """Take a sequence in; see `Rows.add`."""
        self._cache.admit(row)
        self._leases[row], self._prompts[row] = adapter, len(prompt)
        self._temperatures[row] = temperature
        if copy_of in self._waiting and self._is_alike(row, copy_of):
            self._copies.setdefault(copy_of, []).append(row)
        else:
            self._waiting[row] = list(prompt)

    def room(self, row: Hashable) -> int:
        """Return how many tokens may follow the prompt."""
        return self._cache.max_len - self._prompts[row]

    def step(self, tokens: Mapping[Hashable, int], *, ahead: bool = False) -> NextTokens:
        """Decode, then prefill; see `Rows.step`."""
        parts = [self._decode(tokens, ahead=ahead and not self._waiting)] if tokens else []
        parts += self._prefill()
        return parts[0] if len(parts) == 1 else SeveralRuns(tuple(parts))

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """Free the row; see `Rows.remove`."""
        if self._steps is not None:
            self._steps.settle()  # rows move on another stream
        self._leave_copies(row)
        self._cache.release(row, clear=clear)
        self._waiting.pop(row, None)
        self._slots.pop(row, None)
        del self._prompts[row], self._temperatures[row], self._leases[row]

    def clear(self) -> None:
        """Free all rows; see `Rows.clear`."""
        if self._steps is not None:
            self._steps.drop()
        self._cache.clear()
        for of_rows in (self._waiting, self._copies, self._prompts, self._temperatures):
            of_rows.clear()
        self._leases.clear()
        self._slots.clear()
        self._bound = None

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings; see `Rows.use_adapter`."""
        if self._steps is not None:
            self._steps.drop()
        self._decoder.use_adapter(tensor_map)

    def _decode(self, tokens: Mapping[Hashable, int], *, ahead: bool) -> NextTokens:
        """One token for each row up to the last one named; an idle row in between stays as it was.

        What is written behind its length is overwritten by its own next token.
        """
        if self._steps is not None:
            adapter, slots = self._decoder.adapter, self._slots
            return self._steps.run(tokens, self._temperatures, adapter, ahead=ahead, slots=slots)
        places = {self._cache.row_of(row): row for row in tokens}
        count = max(places) + 1
        ids = np.zeros(count, np.int64)
        for place, row in places.items():
            ids[place] = tokens[row]
        rows = None if len(places) == count else np.array(sorted(places))
        self._bind([places.get(place) for place in range(count)])
        logits = self._decoder.decode(ids, rows=rows)
        return RowLogits(tuple(places[place] for place in sorted(places)), logits)

    def _bind(self, rows: Sequence[Hashable | None]) -> None:
        """Give each row of the next run its adapter; None is a row that is idle."""
        if self._adapters is not None:
            leases = [None if row is None else self._leases[row] for row in rows]
            step = self._adapters.rows(leases)
            if step is not self._bound:
                self._decoder.use_adapter(step)
                self._bound = step
            if self._steps is not None:
                self._slots |= zip(rows, step[LORA_SLOT].numpy().tolist(), strict=True)

    def _prefill(self) -> Iterator[NextTokens]:
        """Run the next chunk of every prompt that waits; yield what is found for those that end."""
        for group in self._groups():
            chunks = [self._waiting[row][: self._chunk] for row in group]
            ids = np.zeros((len(group), max(map(len, chunks))), np.int64)
            for padded, chunk in zip(ids, chunks, strict=True):
                padded[: len(chunk)] = chunk
            new = np.array([len(chunk) for chunk in chunks])
            self._bind(group)
            logits = self._decoder.execute(ids, first=self._cache.row_of(group[0]), new=new)
            ended = np.zeros(len(group), np.bool_)
            for place, (row, chunk) in enumerate(zip(group, chunks, strict=True)):
                self._waiting[row] = self._waiting[row][len(chunk) :]
                if not self._waiting[row]:
                    del self._waiting[row]
                    ended[place] = True
            if ended.any():
                yield self._with_copies(self._found(group, logits).only(ended))

    def _is_alike(self, row: Hashable, other: Hashable) -> bool:
        """Whether two rows of one prompt have the same cache and the same candidates."""
        keys = [None if (at := self._leases[r]) is None else at.key for r in (row, other)]
        return keys[0] == keys[1] and self._temperatures[row] == self._temperatures[other]

    def _with_copies(self, found: RowLogits | RowCandidates) -> NextTokens:
        """Copy rows whose prompt has ended to those that share it; they find the same."""
        rows, places = list(found.rows), list(range(len(found.rows)))
        for place, row in enumerate(found.rows):
            for copy in self._copies.pop(row, []):
                self._cache.copy_row(self._cache.row_of(row), self._cache.row_of(copy))
                self._slots |= {copy: self._slots[row]} if row in self._slots else {}
                rows.append(copy)
                places.append(place)
        return found.named(rows, places)

    def _leave_copies(self, row: Hashable) -> None:
        """Hand the prompt of a row that leaves to the first of those that share it."""
        for copies in self._copies.values():
            if row in copies:
                copies.remove(row)
        if heirs := self._copies.pop(row, []):
            self._cache.copy_row(self._cache.row_of(row), self._cache.row_of(heirs[0]))
            self._waiting[heirs[0]] = self._waiting[row]
            self._copies[heirs[0]] = heirs[1:]

    def _found(self, rows: Sequence[Hashable], logits: Tensor) -> RowLogits | RowCandidates:
        """What logits [n, vocab] are for n sequences."""
        if self._ranker is None:
            return RowLogits(tuple(rows), logits.numpy().astype(np.float32, copy=False))
        temperatures = np.array([self._temperatures[row] for row in rows], np.float64)
        found = self._ranker.rank(logits, temperatures)
        return row_candidates(found, {row: place for place, row in enumerate(rows)})

    def _groups(self) -> Iterator[list[Hashable]]:
        """Neighbouring rows whose prompts run together: new, in one chunk, of similar length."""
        group: list[Hashable] = []
        for row in [owner for owner in self._cache.owners if owner in self._waiting]:
            if group and not self._fits([*group, row]):
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def _fits(self, group: Sequence[Hashable]) -> bool:
        places = [self._cache.row_of(row) for row in group]
        left = [len(self._waiting[row]) for row in group]
        are_neighbours = places == list(range(places[0], places[0] + len(places)))
        is_new = not self._cache.lengths[places].any()
        padded = max(left) * len(left)
        return (
            are_neighbours
            and is_new
            and max(left) <= self._chunk
            and padded <= _MOST_PADDING * sum(left)
        )
