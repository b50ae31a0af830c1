"""Continuous batching: sequences of any age, one token each at every step."""

from collections.abc import Hashable, Sequence
from contextlib import suppress

import numpy as np

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError, StateError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.batch_adapters import batch_adapters
from trt_lora.runtime.generation.batch_rows import row_count, rows_of
from trt_lora.runtime.generation.next_tokens import NextTokens
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.running_sequence import RunningSequence, begin_sequence
from trt_lora.runtime.generation.sampling import UNDECIDED, next_keys
from trt_lora.runtime.generation.step_errors import not_numbers, stuck
from trt_lora.runtime.generation.text.prompts import check_prompt
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters


class Batch:
    """Sequences under way on an engine: all with one adapter, or each with its own.

    On an engine for many adapters (`build-engine --max-loras`) and with `adapters`, each sequence
    names its adapter, which stays loaded and in its slot until the sequence has ended. The adapters
    of the others can change no more than the rounding of its logits.

    On a TensorRT engine with a static cache, tokens are chosen from at most 256 candidates a row,
    which the GPU finds; logits come to the host only where those do not tell: a draw beyond them,
    bias, penalties and structured output, more log probabilities than candidates, or any at another
    temperature than 0 and 1. While all sequences are greedy, nothing else is asked of their
    logits and no prompt waits, the next step is begun before the host looks at the tokens of this
    one. Guaranteed is:

    * Tokens are those of the same steps one by one. A sequence that others leave may go on from
      the step that was begun with them: that can change no more than the rounding of its logits.
    * For each sequence that ends, at most one step is computed in vain; for an end by length,
      none. The GPU is one step further when a stop token or a stop string is seen; neither the
      stop token nor what follows is returned.
    * What a step begun ahead computed with the adapter before `use_active_adapter` is forgotten.
    * Its failure is raised by the `step` whose tokens it was to give.

    Not for several threads at a time; each thread may have a batch of its own on one engine.
    """

    @checked
    def __init__(
        self,
        engine: Executor,
        *,
        manager: LoRAManager | None = None,
        adapters: SlotAdapters | None = None,
        rows: int | None = None,
        cache_bytes: int | None = None,
        prefill_chunk: int | None = None,
        tokenizer: TextTokenizer | None = None,
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
            tokenizer: of the engine's directory: tokens then come with their text. Stop strings
                and structured output need one.

        Raises:
            ConfigError: a number is beyond the engine's limits, or the cache grows and sequences
                shall have adapters of their own.
            BackendError: the device has no room for the cache.
        """
        self._manifest, self._tokenizer = engine.manifest, tokenizer
        self._adapters = batch_adapters(engine, manager, adapters)
        self._free = row_count(self._manifest, rows, cache_bytes)
        bindings = self._adapters.bindings()
        self._rows = rows_of(engine, bindings, self._free, prefill_chunk, adapters)
        self._sequences: dict[Hashable, RunningSequence] = {}
        self._held: list[Token] = []  # of a step that has chosen them and not returned them
        self._is_torn = False  # a step or a removal has begun and not ended
        self._leaving = set[Hashable]()  # sequences of which a removal has begun
        self._next = 0
        self.steps_returned = 0  # of which the tokens were, or are just being, returned

    def __len__(self) -> int:
        """The number of sequences under way."""
        return len(self._sequences)

    @property
    def free_rows(self) -> int:
        """How many sequences can be added."""
        return self._free - len(self._sequences)

    @checked
    def tokens(self, row: int) -> tuple[int, ...]:
        """Return the token ids that a sequence was given since it was added.

        Raises:
            ConfigError: there is no such sequence, or it has finished.
        """
        self._check_under_way(row)
        return tuple(self._sequences[row].tokens)

    @checked
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
            sampling: how its tokens are chosen; greedy and 64 tokens by default.
            adapter: of its own, by name or as a lease, which the sequence then owns; by default
                the base model, or what all have.
            answered: how many tokens at the end of the prompt are the answer of a sequence that was
                removed; this one goes on with its draws, and has as many fewer to come.

        Raises:
            ConfigError: the prompt is beyond the engine's limits, or no prompt of this model; or
                all sequences have one adapter; or what `sampling` asks for is refused, such as n
                answers.
            BackendError: structured output is asked for, and llguidance is not installed.
            StateError: no row is free, no slot is, or the cache grows and a step has been made.
            UnknownAdapterError: no adapter of that name is loaded.
        """
        sampling = sampling_of(sampling)
        if sampling.n != 1:
            raise ConfigError(f"n is {sampling.n}, and add takes one sequence; call add_all")
        return self._add(prompt, sampling, adapter, answered=answered)

    @checked
    def add_all(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> tuple[int, ...]:
        """Take in `sampling.n` sequences of one prompt, or none; return their numbers.

        In a static cache the prompt is run once, and its row is copied. Each draws for itself; the
        first as it would alone.

        Args:
            prompt: as in `add`.
            sampling: as in `add`.
            adapter: of all of them, by name.

        Raises:
            ConfigError, BackendError, StateError, UnknownAdapterError: as `add`.
        """
        sampling = sampling_of(sampling)
        if sampling.n > self.free_rows:
            raise StateError(
                f"n is {sampling.n}, and {self.free_rows} rows are free; wait until sequences end, "
                "or make a batch with more rows"
            )
        rows: list[int] = []
        try:
            for index in range(sampling.n):
                first = rows[0] if rows else None
                rows.append(self._add(prompt, sampling, adapter, index=index, copy_of=first))
        except BaseException:
            for row in rows:
                self._remove(row)
            raise
        return tuple(rows)

    def _add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        adapter: Lease | str | None,
        *,
        answered: int = 0,
        index: int = 0,
        copy_of: int | None = None,
    ) -> int:
        self._mend()
        row, at = self._next, {"answered": answered, "index": index}
        ids = check_prompt(f"prompt {row}", prompt, self._manifest)
        sequence = begin_sequence(row, ids, sampling, self._manifest, self._tokenizer, **at)
        lease = self._adapters.lease(adapter)
        temperature = sampling.temperature
        try:
            self._rows.add(row, ids, temperature=temperature, adapter=lease, copy_of=copy_of)
        except BaseException:
            if lease is not adapter:  # one that was passed in stays its owner's
                self._adapters.release(lease)
            raise
        sequence.adapter = lease
        self._sequences[row] = sequence
        self._next += 1
        return row

    def step(self) -> list[Token]:
        """Give every sequence its next token; one that has finished is removed.

        A sequence whose prompt is run in chunks has none until the prompt is through.

        A step is made as a whole or not at all: where anything ends it, an interrupt too, every
        sequence is as it was, and the next step runs its prompt and its answer again. Tokens that
        were chosen by then come with the next step.

        Raises:
            OutputError: logits are NaN or infinite; the message names the adapter. The sequences
                that they belong to are removed; the tokens of the others come with the next step.
                Or a sequence cannot go on: structured output became too complex to follow, or its
                parameters allow no token.
            BackendError: the engine's run failed.
        """
        self._mend()
        if self._held or not self._sequences:
            return self._handed_out()
        self._remove_stuck()
        self._is_torn = True
        under_way = {row: s for row, s in self._sequences.items() if len(s.answer) > s.begun}
        tokens = {row: sequence.answer[-1] for row, sequence in under_way.items()}
        found = self._rows.step(tokens, ahead=self._is_known_to_go_on())
        numbers = found.are_numbers()
        self._held = self._advance(found if numbers.all() else found.only(numbers))
        self._settle()
        if numbers.all():
            return self._handed_out()
        wrong = [row for row, is_right in zip(found.rows, numbers, strict=True) if not is_right]
        leases = [self._sequences[row].adapter for row in wrong]
        names = [None if lease is None else lease.name for lease in leases]
        for row in wrong:
            self._remove(row, clear=True)
        raise not_numbers(wrong, self._adapters.described(names))

    @checked
    def remove(self, row: int) -> None:
        """Let a sequence go before its end.

        Raises:
            ConfigError: there is no such sequence, or it has finished.
        """
        self._mend()
        self._check_under_way(row)
        self._remove(row)

    def clear(self) -> None:
        """Let all sequences go."""
        self._mend()
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
            sequence.is_greedy and len(sequence.answer) + 1 < self._most(row)
            for row, sequence in self._sequences.items()
        )

    def _most(self, row: Hashable) -> int:
        """Tokens that a sequence's answer may have."""
        return self._sequences[row].most_tokens(self._rows.room(row))

    def _advance(self, found: NextTokens) -> list[Token]:
        """Choose the next token of sequences; where there is none to choose, note why."""
        sequences = [self._sequences[row] for row in found.rows]
        if not sequences:
            return []
        keys = np.concatenate([next_keys(sequence.draws) for sequence in sequences])
        sampling = [sequence.sampling for sequence in sequences]
        processes = [s.process if s.changes_logits else None for s in sequences]
        chosen = found.choose(sampling, keys, processes)
        logprobs = found.logprobs(chosen, sampling)
        results = []
        for sequence, token, known in zip(sequences, chosen.tolist(), logprobs, strict=True):
            if token == UNDECIDED:
                sequence.failure = "its parameters forbid every token that could come next"
            else:
                results.append(sequence.append(token, self._most(sequence.row), known))
        return results

    def _settle(self) -> None:
        """Keep what a step has chosen, and let go of the sequences that have ended."""
        for sequence in self._sequences.values():
            sequence.settled = len(sequence.answer)
        for token in self._held:
            if token.finish_reason is not None and token.row in self._sequences:
                self._remove(token.row)
        self._is_torn = False

    def _handed_out(self) -> list[Token]:
        self.steps_returned += 1
        held, self._held = self._held, []
        return held

    def _mend(self) -> None:
        """Begin every row again behind what whole steps have given, if the last one did not end."""
        if not self._is_torn:
            return
        self._rows.clear()
        ended = {token.row for token in self._held if token.finish_reason is not None}
        for gone in self._sequences.keys() & (ended | self._leaving):
            with suppress(StateError):  # it was released, and no more
                self._adapters.release(self._sequences[gone].adapter)
            del self._sequences[gone]
        self._leaving.clear()
        for row, sequence in self._sequences.items():
            if self._held:  # it had chosen
                sequence.settled = len(sequence.answer)
            sequence.restart()
            self._rows.add(
                row,
                (*sequence.prompt, *sequence.answer),
                temperature=sequence.sampling.temperature,
                adapter=sequence.adapter,
            )
        self._is_torn = False

    def _check_under_way(self, row: int) -> None:
        if row not in self._sequences:
            raise ConfigError(f"sequence {row} is not under way; those are {list(self._sequences)}")

    def _remove(self, row: Hashable, *, clear: bool = False) -> None:
        was_torn, self._is_torn = self._is_torn, True
        self._leaving.add(row)
        self._rows.remove(row, clear=clear)
        self._adapters.release(self._sequences[row].adapter)
        del self._sequences[row]
        self._leaving.discard(row)
        self._is_torn = was_torn

    def _remove_stuck(self) -> None:
        """Remove the sequences that cannot go on, and raise an OutputError of them."""
        reasons = {row: s.error for row, s in self._sequences.items() if s.error}
        for row in reasons:
            self._remove(row)
        if reasons:
            raise stuck(reasons)
