"""Sequences in a static KV cache: they join and leave at any step."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.rows import RowLogits
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.tensor import TensorMap

# Prompts are run together where padding them to one length adds no more than a quarter.
_MOST_PADDING = 1.25


class StaticRows:
    """`Rows` of an engine whose cache is written in place."""

    def __init__(
        self, executor: Executor, tensor_map: TensorMap, rows: int, prefill_chunk: int
    ) -> None:
        """Allocate the cache.

        Args:
            executor: a running engine.
            tensor_map: holds the engine's LoRA bindings.
            rows: sequences at a time, most.
            prefill_chunk: tokens of a prompt that one step runs, most.
        """
        self._decoder = StaticDecoder(executor, tensor_map, rows)
        self._cache = self._decoder.cache
        self._chunk = prefill_chunk
        self._waiting: dict[Hashable, list[int]] = {}  # what is left of prompts
        self._prompts: dict[Hashable, int] = {}  # how long they are

    def add(self, row: Hashable, prompt: Sequence[int]) -> None:
        """Take a sequence in; see `Rows.add`."""
        self._cache.admit(row)
        self._waiting[row], self._prompts[row] = list(prompt), len(prompt)

    def room(self, row: Hashable) -> int:
        """Return how many tokens may follow the prompt."""
        return self._cache.max_len - self._prompts[row]

    def step(self, tokens: Mapping[Hashable, int]) -> RowLogits:
        """Decode, then prefill; see `Rows.step`."""
        found = dict[Hashable, Logits]()
        if tokens:
            found |= self._decode(tokens)
        found |= self._prefill()
        return RowLogits(tuple(found), np.stack(list(found.values())) if found else _NOTHING)

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """Free the row; see `Rows.remove`."""
        self._cache.release(row, clear=clear)
        self._waiting.pop(row, None)
        del self._prompts[row]

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings; see `Rows.use_adapter`."""
        self._decoder.use_adapter(tensor_map)

    def _decode(self, tokens: Mapping[Hashable, int]) -> dict[Hashable, Logits]:
        """One token for each row up to the last one named; an idle row in between stays as it was.

        What is written behind its length is overwritten by its own next token.
        """
        places = {self._cache.row_of(row): row for row in tokens}
        count = max(places) + 1
        ids = np.zeros(count, np.int64)
        for place, row in places.items():
            ids[place] = tokens[row]
        rows = None if len(places) == count else np.array(sorted(places))
        logits = self._decoder.decode(ids, rows=rows)
        return {places[place]: row for place, row in zip(sorted(places), logits, strict=True)}

    def _prefill(self) -> dict[Hashable, Logits]:
        """The next chunk of every prompt that waits; the logits of those that end."""
        found = dict[Hashable, Logits]()
        for group in self._groups():
            chunks = [self._waiting[row][: self._chunk] for row in group]
            ids = np.zeros((len(group), max(map(len, chunks))), np.int64)
            for padded, chunk in zip(ids, chunks, strict=True):
                padded[: len(chunk)] = chunk
            new = np.array([len(chunk) for chunk in chunks])
            logits = self._decoder.run(ids, first=self._cache.row_of(group[0]), new=new)
            for row, chunk, last in zip(group, chunks, logits, strict=True):
                self._waiting[row] = self._waiting[row][len(chunk) :]
                if not self._waiting[row]:
                    del self._waiting[row]
                    found[row] = last
        return found

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


_NOTHING: Logits = np.zeros((0, 1), np.float32)  # no rows, of which a maximum can be taken
