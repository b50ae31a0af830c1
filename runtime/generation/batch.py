"""Continuous batching: sequences of any age, one token each at every step."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trt_lora.plugins.errors import ConfigError, OutputError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.batch_adapters import batch_adapters
from trt_lora.runtime.generation.decoding.cache_regions import rows_within
from trt_lora.runtime.generation.decoding.growing_rows import GrowingRows
from trt_lora.runtime.generation.decoding.rows import Rows
from trt_lora.runtime.generation.decoding.static_rows import StaticRows
from trt_lora.runtime.generation.next_tokens import NextTokens
from trt_lora.runtime.generation.sampling import SamplingParams, generator
from trt_lora.runtime.generation.text.prompts import check_prompt
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import STATIC, Manifest

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Token:
    """What a step made of one sequence."""

    row: int  # as `Batch.add` returned it
    token_id: int | None  # None where it is a stop token
    finish_reason: FinishReason | None = None  # None: the sequence goes on


@dataclass
class _Sequence:
    sampling: SamplingParams
    adapter: Lease | None  # of its own
    stop_token_ids: tuple[int, ...]
    draws: np.random.Generator
    most_tokens: int  # by its own parameters, less what was answered before it was added
    tokens: list[int] = field(default_factory=list)


class Batch:
    """Sequences under way on an engine: all with one adapter, or each with its own.

    On an engine for many adapters (`build-engine --max-loras`) and with `adapters`, each sequence
    names its adapter, which stays loaded and in its slot until the sequence has ended. The adapters
    of the others can change no more than the rounding of its logits.

    On a TensorRT engine with a static cache, tokens are chosen from at most 256 candidates a row,
    which the GPU finds; logits come to the host only where those do not decide, and for a greedy
    sequence never. While all sequences are greedy and no prompt waits, the next step is begun
    before the host looks at the tokens of this one. Guaranteed is:

    * Tokens are those of the same steps one by one. A sequence that others leave may go on from
      the step that was begun with them: that can change no more than the rounding of its logits.
    * For each sequence that ends, at most one step is computed in vain; for an end by length,
      none. The GPU is one step further when a stop token is seen, and neither the token nor what
      follows it is returned. Whoever looks for stop strings in the text calls `remove`.
    * What a step begun ahead computed with the adapter before `use_active_adapter` is forgotten.
    * Its failure is raised by the `step` whose tokens it was to give.

    Not for several threads at a time; each thread may have a batch of its own on one engine.
    """

    def __init__(
        self,
        engine: Executor,
        *,
        manager: LoRAManager | None = None,
        adapters: SlotAdapters | None = None,
        rows: int | None = None,
        cache_bytes: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """Make room for sequences.

        Args:
            engine: a running engine.
            manager: holds the adapters; its active one answers, or the base model.
            adapters: instead of `manager`: those that sequences name.
            rows: sequences at a time, most; the engine's largest batch by default. A static cache
                is allocated for so many.
            cache_bytes: instead of `rows`: as many sequences as a static cache of this size holds.
            prefill_chunk: tokens of a prompt that one step runs, most, so that a long prompt keeps
                others waiting for less; whole prompts by default. Of a static cache alone.

        Raises:
            ConfigError: a number is beyond the engine's limits, or the cache grows and sequences
                shall have adapters of their own.
            BackendError: the device has no room for the cache.
        """
        manifest = engine.manifest
        self._manifest = manifest
        self._adapters = batch_adapters(engine, manager, adapters)
        if cache_bytes is not None:
            _check_budget(manifest, rows)
            rows = rows_within(manifest, cache_bytes)
        rows = manifest.max_batch_size if rows is None else rows
        chunk = manifest.max_input_len if prefill_chunk is None else prefill_chunk
        _check("rows", rows, manifest.max_batch_size)
        _check("prefill_chunk", chunk, manifest.max_input_len)
        bindings = self._adapters.bindings()
        self._rows: Rows = (
            StaticRows(engine, bindings, rows, chunk, adapters)
            if manifest.kv_cache == STATIC
            else GrowingRows(engine, bindings)
        )
        self._sequences: dict[Hashable, _Sequence] = {}
        self._held: list[Token] = []  # of a step in which another sequence had no numbers
        self._free = rows
        self._next = 0

    def __len__(self) -> int:
        """The number of sequences under way."""
        return len(self._sequences)

    @property
    def free_rows(self) -> int:
        """How many sequences can be added."""
        return self._free - len(self._sequences)

    def tokens(self, row: int) -> tuple[int, ...]:
        """Return the token ids that a sequence was given since it was added.

        Raises:
            ConfigError: there is no such sequence, or it has finished.
        """
        self._check_under_way(row)
        return tuple(self._sequences[row].tokens)

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        adapter: Lease | str | None = None,
        answered: int = 0,
    ) -> int:
        """Take a sequence in; its first token comes with a later step. Return its number.

        Args:
            prompt: token ids.
            sampling: how its tokens are chosen; greedy by default.
            adapter: of its own, by name or as a lease, which the sequence then owns; by default
                the base model, or what all have.
            answered: how many tokens at the end of the prompt are the answer of a sequence that was
                removed; this one goes on with its draws, and has as many fewer to come.

        Raises:
            ConfigError: the prompt is beyond the engine's limits, or no prompt of this model; or
                all sequences have one adapter.
            StateError: no row is free, no slot is, or the cache grows and a step has been made.
            UnknownAdapterError: no adapter of that name is loaded.
        """
        sampling = sampling or SamplingParams()
        ids = check_prompt(f"prompt {self._next}", prompt, self._manifest)
        row = self._next
        stops = _stop_token_ids(self._manifest, sampling)
        lease = self._adapters.lease(adapter)
        try:
            self._rows.add(row, ids, temperature=sampling.temperature, adapter=lease)
        except BaseException:
            if lease is not adapter:  # one that was passed in stays its owner's
                self._adapters.release(lease)
            raise
        draws = generator(sampling.seed, ids, answered)
        most = sampling.max_new_tokens - answered
        self._sequences[row] = _Sequence(sampling, lease, stops, draws, most)
        self._next += 1
        return row

    def step(self) -> list[Token]:
        """Give every sequence its next token; one that has finished is removed.

        A sequence whose prompt is run in chunks has none until the prompt is through.

        Raises:
            OutputError: logits are NaN or infinite; the message names the adapter. The sequences
                that they belong to are removed; the tokens of the others come with the next step.
        """
        if self._held or not self._sequences:
            held, self._held = self._held, []
            return held
        tokens = {row: s.tokens[-1] for row, s in self._sequences.items() if s.tokens}
        found = self._rows.step(tokens, ahead=self._is_known_to_go_on())
        numbers = found.are_numbers()
        if numbers.all():
            return self._advance(found)
        wrong = [row for row, is_right in zip(found.rows, numbers, strict=True) if not is_right]
        right = found.only(numbers)
        leases = [self._sequences[row].adapter for row in wrong]
        names = [None if lease is None else lease.name for lease in leases]
        for row in wrong:
            self._remove(row, clear=True)
        self._held = self._advance(right)
        raise self._not_numbers(wrong, names)

    def remove(self, row: int) -> None:
        """Let a sequence go before its end.

        Raises:
            ConfigError: there is no such sequence, or it has finished.
        """
        self._check_under_way(row)
        self._remove(row)

    def clear(self) -> None:
        """Let all sequences go."""
        for row in list(self._sequences):
            self._remove(row)

    def use_active_adapter(self) -> None:
        """Take the manager's active adapter from the next step on.

        What a sequence has in the cache stays as the adapter before made it.

        Raises:
            ConfigError: sequences have adapters of their own.
        """
        self._rows.use_adapter(self._adapters.bindings())

    def _is_known_to_go_on(self) -> bool:
        """Whether every sequence is greedy, and its next token not its last by length."""
        return all(
            not sequence.sampling.temperature and len(sequence.tokens) + 1 < self._most(row)
            for row, sequence in self._sequences.items()
        )

    def _most(self, row: Hashable) -> int:
        """Tokens that a sequence may have."""
        return min(self._sequences[row].most_tokens, self._rows.room(row))

    def _advance(self, found: NextTokens) -> list[Token]:
        """Choose the next token of sequences, and remove those that end with it."""
        sequences = [self._sequences[row] for row in found.rows]
        draws = np.array([sequence.draws.random() for sequence in sequences])
        sampling = [sequence.sampling for sequence in sequences]
        chosen = found.choose(sampling, draws) if sequences else ()
        return [
            self._append(row, int(token)) for row, token in zip(found.rows, chosen, strict=True)
        ]

    def _append(self, row: Hashable, token: int) -> Token:
        assert isinstance(row, int)  # as `add` named it
        sequence = self._sequences[row]
        if token in sequence.stop_token_ids:
            self._remove(row)
            return Token(row, None, "stop")
        sequence.tokens.append(token)
        if len(sequence.tokens) < self._most(row):
            return Token(row, token)
        self._remove(row)
        return Token(row, token, "length")

    def _check_under_way(self, row: int) -> None:
        if row not in self._sequences:
            raise ConfigError(f"sequence {row} is not under way; those are {list(self._sequences)}")

    def _remove(self, row: Hashable, *, clear: bool = False) -> None:
        self._rows.remove(row, clear=clear)
        self._adapters.release(self._sequences.pop(row).adapter)

    def _not_numbers(self, rows: Sequence[Hashable], names: Sequence[str | None]) -> OutputError:
        adapters = self._adapters.described(names)
        return OutputError(
            f"the logits of prompt {', '.join(map(str, rows))} are NaN or infinite with {adapters}"
            ": a value left the engine's number range; use a lower strength, or build with --dtype "
            "float32 or bfloat16",
            rows,
        )


def _stop_token_ids(manifest: Manifest, sampling: SamplingParams) -> tuple[int, ...]:
    if sampling.stop_token_ids is None:
        return manifest.base_model.stop_token_ids
    return token_ids("stop_token_ids", sampling.stop_token_ids, manifest.vocabulary_size)


def _check_budget(manifest: Manifest, rows: int | None) -> None:
    if rows is not None:
        raise ConfigError("rows and cache_bytes both say how many sequences; pass one of them")
    if manifest.kv_cache != STATIC:
        raise ConfigError(
            "cache_bytes is for a static cache, and this engine's grows; pass rows, or build with "
            "--kv-cache static"
        )


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}, expected a whole number from 1 to {most}")
