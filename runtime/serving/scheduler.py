"""Scheduler: continuous batching, each request with an adapter of its own."""

from collections import abc
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError, LoRAError, StateError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.cache_regions import row_count
from trt_lora.runtime.generation.decoding.rows import Rows
from trt_lora.runtime.generation.next_tokens import NextTokens
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.sampling import UNDECIDED, next_keys
from trt_lora.runtime.generation.sequence import Sequence, new_sequence
from trt_lora.runtime.generation.step_errors import not_numbers, stuck
from trt_lora.runtime.generation.text.prompts import Prompt, prompt_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import HOST
from trt_lora.runtime.serving.admission import AdmissionPolicy
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.serving.step_adapters import step_adapters

# Tokens of prompts that run about as long as one token for each of full rows.
_BUDGET = {"host": 64, "device": 512}


@short_repr
@dataclass(frozen=True)
class StepAnswers:
    """What a step has given requests, by their numbers."""

    tokens: abc.Mapping[int, Token]  # at most one each
    failed: abc.Mapping[int, BaseException]  # why requests have ended without their last token


class Scheduler:
    """Takes requests at any time, and gives those that have a row a token at every step.

    A step decodes first: every sequence whose prompt was run has its next token. Then the prompts
    of others are run, the oldest first, as many tokens as the budget allows, so that a long prompt
    keeps nobody waiting for long. See `AdmissionPolicy` for who is given a row when.

    A request is answered by what its adapter's name means when it joins, to its end: what is loaded
    in its place meanwhile answers later requests. What other requests do changes no more than the
    rounding of its logits.

    When a sequence ends, its row stays until another one needs it: a request with the same adapter
    and salt that begins alike runs only the rest of its prompt.

    On an engine that finds candidates where its logits are, tokens are chosen from at most 256 of
    them a row; logits come to the host only where those do not tell. While all sequences are
    greedy, nothing else is asked of their logits and no prompt waits, the next step is begun before
    the host looks at the tokens of this one. Tokens are those of the same steps one by one, and at
    most one overlapped step is discarded for each sequence that ends, none for an end by length.

    A step is made as a whole or not at all: where anything ends it, an interrupt too, every
    sequence is as it was, and the next step runs its prompt and its answer again. Tokens that were
    chosen by then come with the next step. An interrupt that comes in the few lines in which
    requests change places cannot be mended: all are let go, and every later call raises a
    StateError that says so.

    Not for several threads at a time; but any thread may load, replace, unload and pin adapters.
    """

    @checked
    def __init__(
        self,
        engine: Executor,
        adapters: SlotAdapters | None = None,
        *,
        manager: LoRAManager | None = None,
        config: ServingConfig | None = None,
        rows: int | None = None,
        cache_bytes: int | None = None,
        max_num_batched_tokens: int | None = None,
        shares_prefixes: bool = True,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """Make room for rows.

        Args:
            engine: a running engine.
            adapters: of an engine with slots; requests name them.
            manager: instead: its active adapter answers all; without both, the base model.
            config: of the `AdmissionPolicy`.
            rows: sequences at a time, most; the engine's largest batch by default.
            cache_bytes: instead of `rows`: as many as a cache of this size holds.
            max_num_batched_tokens: of prompts in one step, over all rows, but never less than one
                chunk of one; 64 on the host and 512 on a GPU by default, about what a decode step
                costs there.
            shares_prefixes: run a prefix that another request had only once.
            tokenizer: of the engine's directory: tokens then come with their text. Stop strings
                and structured output need one.

        Raises:
            ConfigError: a number is beyond the engine's limits, or both `adapters` and `manager`
                are given.
            BackendError: the device has no room for the cache.
        """
        self._manifest, self._tokenizer = engine.manifest, tokenizer
        self._adapters = step_adapters(engine, manager, adapters)
        count = row_count(self._manifest, rows, cache_bytes)
        self._budget = _budget(max_num_batched_tokens, engine.memory)
        self._rows = Rows(
            engine,
            self._adapters.bindings(),
            count,
            adapters=adapters,
            shares_prefixes=shares_prefixes,
        )
        self._policy = AdmissionPolicy(self._adapters.cache, config)
        self._sequences: dict[int, Sequence] = {}  # all that wait or run, by id
        self._held: list[Token] = []  # that no step has returned yet
        self._failed: dict[int, BaseException] = {}  # the same
        self._is_returned = False  # by the last step: both have reached the caller
        self._unsettled: list[Token] = []  # chosen, and not held yet
        self._is_torn = False  # a run has begun, and its tokens are not taken
        self._is_moving = False  # requests are changing places
        self._next = 0

    def __len__(self) -> int:
        """How many requests wait or run."""
        return len(self._sequences)

    def __contains__(self, request: object) -> bool:
        """Whether a request waits or runs."""
        return request in self._sequences

    @property
    def running(self) -> int:
        """How many requests have a row."""
        return len(self._rows.cache.owners)

    @property
    def shared_tokens(self) -> int:
        """How many tokens of prompts were not run: other requests had begun with them."""
        return self._rows.shared_tokens

    @checked
    def tokens(self, request: int) -> tuple[int, ...]:
        """Return the token ids that a request was given so far.

        Raises:
            StateError: it has ended, or there never was one.
        """
        return tuple(self._sequence(request).answer)

    @checked
    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: Lease | str | None = None,
        client: abc.Hashable = None,
        salt: str | None = None,
    ) -> int:
        """Let a request wait for its turn; return its number.

        Args:
            prompt: token ids, or with a tokenizer a user's message or a conversation.
            sampling: how its tokens are chosen; greedy and 64 tokens by default.
            adapter: by name, or as a lease, which the request then owns; the base model by default,
                or what all have.
            client: whose request it is; clients share the rows by what they have received.
            salt: prefixes are shared among requests with the same one.

        Raises:
            ConfigError: the prompt is beyond the engine's limits, or no prompt of this model; or
                all sequences have one adapter; or `sampling` asks for n answers, for text where
                there is no tokenizer, for tokens that the model does not have, or for structured
                output that is refused.
            BackendError: structured output is asked for, and llguidance is not installed.
            UnknownAdapterError: no adapter of that name is loaded.
        """
        sampling = sampling_of(sampling)
        if sampling.n != 1:
            raise ConfigError(f"n is {sampling.n}, and submit takes one request; call submit_all")
        lease = adapter if isinstance(adapter, Lease) else None
        name = adapter.name if isinstance(adapter, Lease) else adapter
        if not isinstance(name, str | None):
            raise ConfigError(
                f"adapter is {shown(adapter)}, expected its name, a lease of it, or None for the "
                "base model"
            )
        return self._submit(self._ids(prompt), sampling, name, lease, client, salt)

    @checked
    def submit_all(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        client: abc.Hashable = None,
        salt: str | None = None,
    ) -> tuple[int, ...]:
        """Submit `sampling.n` requests of one prompt, or none; return their numbers.

        The prompt is run once. Each draws for itself; the first as it would alone.

        Args:
            prompt: as in `submit`, and so are the others.
            sampling: as in `submit`.
            adapter: of all of them, by name.
            client: as in `submit`.
            salt: as in `submit`.

        Raises:
            ConfigError, BackendError, UnknownAdapterError: as `submit`.
        """
        ids, sampling = self._ids(prompt), sampling_of(sampling)
        numbers: list[int] = []
        try:
            for index in range(sampling.n):
                number = self._submit(ids, sampling, adapter, None, client, salt, index=index)
                numbers.append(number)
        except BaseException:
            for number in numbers:
                self.cancel(number)
            raise
        return tuple(numbers)

    def step(self, deliver: abc.Callable[[StepAnswers], None] | None = None) -> StepAnswers:
        """Let requests join, and give every row its next token.

        A request that fails ends with its error, and nobody else does. One whose logits are NaN or
        infinite has an OutputError that names the adapter, one whose structured output cannot go on
        too; one whose adapter cannot be read an AdapterError, one whose adapter was unloaded while
        it waited an UnknownAdapterError.

        Args:
            deliver: takes the tokens that were decoded, before prompts are run; they are not in
                what is returned then. An error of its own ends the step, and they count as
                delivered.

        Raises:
            BackendError: the engine's run failed; the next step makes it anew.
            StateError: an interrupt came while requests changed places, before.
        """
        self._mend()
        try:
            if not self._held:
                self._step(deliver)
            answers = self._answers()
            self._is_returned = True
            return answers
        except BaseException:
            self._is_returned = False
            if self._is_moving:
                self._let_go()
            raise

    @checked
    def cancel(self, request: int) -> None:
        """Let a request go, whether it waits or runs.

        Raises:
            StateError: it has ended, or there never was one.
        """
        self._mend()
        with self._changing_places():
            self._end(self._sequence(request))

    @checked
    def preempt(self, request: int) -> None:
        """Take the row from a request; it goes on behind its tokens when its turn comes again.

        Its age does not change, so that nothing younger goes before it. Its draws go on, too.

        Raises:
            StateError: it has no row.
        """
        self._mend()
        sequence = self._sequences.get(request)
        if sequence is None or sequence not in self._rows.cache.owners:
            those = [running.id for running in self._rows.sequences]
            raise StateError(f"request {request} has no row; those that have: {those}")
        with self._changing_places():
            self._preempt(sequence)

    def clear(self) -> None:
        """Let all requests go."""
        self._mend()
        with self._changing_places():
            for sequence in list(self._sequences.values()):
                self._end(sequence)

    def use_active_adapter(self) -> None:
        """Take the manager's active adapter from the next step on.

        What a sequence has in the cache stays as the adapter before made it. What a step begun
        ahead has computed with that one is forgotten.

        Raises:
            ConfigError: sequences have adapters of their own.
        """
        self._rows.use_adapter(self._adapters.bindings())

    def check_integrity(self) -> None:
        """Raise StateError if requests, rows, leases and slots do not add up."""
        self._mend()
        self._policy.check_integrity()
        self._rows.cache.check_integrity()
        running = {sequence.id for sequence in self._rows.sequences}
        if running != {s.id for s in self._policy.running} or not running <= self._sequences.keys():
            raise StateError(f"{running} have rows, and {[*self._policy.running]} run")

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        label = f"request {self._next}"
        return tuple(prompt_ids(label, prompt, self._tokenizer, self._manifest))

    def _submit(
        self,
        ids: tuple[int, ...],
        sampling: SamplingParams,
        adapter: str | None,
        lease: Lease | None,
        client: abc.Hashable,
        salt: str | None,
        *,
        index: int = 0,
    ) -> int:
        sequence = new_sequence(
            self._next, ids, sampling, self._manifest, self._tokenizer, index=index
        )
        sequence.adapter, sequence.client, sequence.salt = adapter, client, salt
        self._mend()
        with self._changing_places():
            sequence.lease = lease
            if lease is not None:
                sequence.generation = lease.generation
            self._policy.submit(sequence)
            self._sequences[sequence.id] = sequence
            self._next += 1
        return sequence.id

    def _step(self, deliver: abc.Callable[[StepAnswers], None] | None) -> None:
        self._end_stuck()
        self._schedule()
        self._take(lambda: self._rows.decode(ahead=self._is_known_to_go_on()))
        if deliver is not None and self._rows.waits_for_prompts:
            answers = self._answers()
            self._held, self._failed = [], {}
            deliver(answers)
        self._take(lambda: self._rows.prefill(self._budget))

    def _schedule(self) -> None:
        """Let requests join, and those be preempted whose adapter must leave its slot."""
        with self._changing_places():
            scheduled = self._policy.schedule(self._rows.cache.rows - self.running)
            for sequence, error in scheduled.failed:
                self._failed[sequence.id] = error
                self._release(sequence)
                del self._sequences[sequence.id]
            for sequence in scheduled.preempted:
                self._preempt(sequence)
            for sequence in scheduled.joined:
                self._rows.add(sequence)
                self._policy.charge(sequence, len(sequence.pending))

    def _take(self, run: abc.Callable[[], NextTokens | None]) -> None:
        """Run something of a step, and choose what sequences are given by it."""
        self._is_torn = True
        found = run()
        if found is not None:
            numbers = found.are_numbers()
            wrong = [s for s, is_right in zip(found.rows, numbers, strict=True) if not is_right]
            self._unsettled = self._chosen(found.only(numbers) if wrong else found)
            self._settle()
            self._fail_not_finite(wrong)
        self._is_torn = False

    def _chosen(self, found: NextTokens) -> list[Token]:
        """Choose the next token of sequences; where there is none to choose, note why."""
        sequences = [self._sequences[s.id] for s in found.rows]
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
                results.append(sequence.append(token, known))
                self._policy.charge(sequence, 1)
        return results

    def _settle(self) -> None:
        """Keep what a run has chosen, and let go of the sequences that have ended."""
        for sequence in self._rows.sequences:
            sequence.settled = len(sequence.answer)
        held = {token.row for token in self._held}
        self._held += [token for token in self._unsettled if token.row not in held]
        ended = [t.row for t in self._unsettled if t.finish_reason is not None]
        with self._changing_places():
            for number in ended:
                if number in self._sequences:
                    self._end(self._sequences[number])
        self._unsettled = []

    def _fail_not_finite(self, wrong: abc.Sequence[Sequence]) -> None:
        if wrong:
            described = self._adapters.described([sequence.adapter for sequence in wrong])
            error = not_numbers([sequence.id for sequence in wrong], described)
            with self._changing_places():
                for sequence in wrong:
                    self._failed[sequence.id] = error
                    self._end(sequence, clear=True)

    def _end_stuck(self) -> None:
        """End the sequences that cannot go on."""
        reasons = {s: s.error for s in self._rows.sequences if s.error}
        for sequence, reason in reasons.items():
            with self._changing_places():
                self._failed[sequence.id] = stuck({sequence.id: reason})
                self._end(sequence)

    def _is_known_to_go_on(self) -> bool:
        """Whether every sequence is greedy, and its next token not its last by length."""
        return all(sequence.is_greedy and sequence.left > 1 for sequence in self._rows.sequences)

    def _answers(self) -> StepAnswers:
        return StepAnswers({token.row: token for token in self._held}, dict(self._failed))

    def _sequence(self, request: int) -> Sequence:
        if request not in self._sequences:
            raise StateError(f"request {request} neither waits nor runs: {list(self._sequences)}")
        return self._sequences[request]

    def _end(self, sequence: Sequence, *, clear: bool = False) -> None:
        """Let a sequence go that waits or runs."""
        if sequence in self._rows.cache.owners:
            self._rows.remove(sequence, clear=clear)
        self._release(sequence)
        self._policy.end(sequence)
        del self._sequences[sequence.id]

    def _preempt(self, sequence: Sequence) -> None:
        self._rows.remove(sequence)
        lease, sequence.leader = sequence.lease, None
        self._policy.preempt(sequence)
        sequence.lease = None
        if lease is not None:
            self._adapters.cache.release(lease)

    def _release(self, sequence: Sequence) -> None:
        lease, sequence.lease = sequence.lease, None
        if lease is not None:
            self._adapters.cache.release(lease)

    @contextmanager
    def _changing_places(self) -> abc.Iterator[None]:
        """What is refused has changed nothing; what is interrupted cannot go on."""
        self._is_moving = True
        try:
            yield
        except LoRAError:
            self._is_moving = False
            raise
        except BaseException:
            self._let_go()
            raise
        self._is_moving = False

    def _mend(self) -> None:
        """Forget what has reached the caller, and begin rows again whose last run did not end.

        Raises:
            StateError: requests were changing places when an interrupt came.
        """
        if self._is_moving:
            self._let_go()  # the interrupt may have come before, or there were two
            raise StateError(
                "this scheduler was interrupted while requests changed places, and has let go of "
                "all of them; make another one, and submit what has not ended"
            )
        if self._is_returned:
            self._held, self._failed, self._is_returned = [], {}, False
        if self._unsettled:
            self._settle()
        if self._is_torn:
            running = self._rows.sequences
            self._rows.clear()
            for sequence in running:
                sequence.restart()
                self._rows.add(sequence)
            self._is_torn = False

    def _let_go(self) -> None:
        """Give back every lease, whoever had it at the moment of the interrupt."""
        held = [s.lease for s in self._sequences.values() if s.lease is not None]
        try:
            self._rows.clear()
        finally:
            for lease in dict.fromkeys([*held, *self._policy.leases]):
                with suppress(StateError):  # it was given back, and no more
                    self._adapters.cache.release(lease)
            self._sequences.clear()


def _budget(asked: int | None, memory: Memory) -> int:
    budget = _BUDGET["host" if memory.device == HOST else "device"] if asked is None else asked
    if budget < 1:
        raise ConfigError(f"max_num_batched_tokens is {budget}, expected a whole number from 1 on")
    return budget
