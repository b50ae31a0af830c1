"""Scheduler: requests with adapters of their own, answered by a batch that they join and leave."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError, LoRAError, OutputError, StateError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.batch import Batch
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.running_sequence import begin_sequence
from trt_lora.runtime.generation.text.prompts import Prompt, prompt_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.lora_batcher import LoRABatcher
from trt_lora.runtime.serving.request import Request
from trt_lora.runtime.serving.running import Running


@short_repr
@dataclass(frozen=True)
class StepAnswers:
    """What a step has given requests, by their numbers."""

    tokens: Mapping[int, Token]  # at most one each; `row` is that of the batch
    failed: Mapping[int, BaseException]  # why requests have ended without their last token


class Scheduler:
    """Takes requests at any time, and gives those that fit a token at every step.

    A request is answered by what its adapter's name means when it joins, to its end: what is loaded
    in its place meanwhile answers later requests. See `LoRABatcher` for who joins when.

    An interrupt that comes in the few lines in which requests change places cannot be mended: all
    requests are let go, and every later call raises a StateError that says so.

    Not for several threads at a time; but any thread may load, replace, unload and pin adapters.
    """

    @checked
    def __init__(
        self,
        engine: Executor,
        adapters: SlotAdapters,
        *,
        config: BatcherConfig | None = None,
        rows: int | None = None,
        cache_bytes: int | None = None,
        prefill_chunk: int | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """Make room for rows.

        Args:
            engine: a running engine with slots and a static cache.
            adapters: of this engine; requests name them.
            config: of the `LoRABatcher`.
            rows: of the `Batch`.
            cache_bytes: of the `Batch`.
            prefill_chunk: of the `Batch`.
            tokenizer: of the `Batch`.

        Raises:
            ConfigError, BackendError: as `Batch`.
        """
        self._manifest, self._adapters, self._tokenizer = engine.manifest, adapters, tokenizer
        self._batch = Batch(
            engine,
            adapters=adapters,
            rows=rows,
            cache_bytes=cache_bytes,
            prefill_chunk=prefill_chunk,
            tokenizer=tokenizer,
        )
        self._batcher: LoRABatcher[Lease] = LoRABatcher(adapters, config)
        self._rows: dict[int, int] = {}  # of the batch, by request
        self._requests: dict[int, int] = {}  # by row
        self._leases: dict[int, Lease] = {}  # that requests came with, until they join or end
        self._failed: dict[int, BaseException] = {}  # that no step has returned yet
        self._is_torn = False  # requests are changing places
        self._next = 0

    def __len__(self) -> int:
        """How many requests wait or run."""
        return self._batcher.waiting + self._batcher.running

    def __contains__(self, request: object) -> bool:
        """Whether a request waits or runs."""
        return self._batcher.has(request)

    @checked
    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: Lease | str | None = None,
    ) -> int:
        """Let a request wait for its turn; return its number.

        Args:
            prompt: token ids, or with a tokenizer a user's message or a conversation.
            sampling: how its tokens are chosen; greedy and 64 tokens by default.
            adapter: by name, or as a lease, which the request then owns; the base model by default.
                A request with a lease fails if the name means another adapter when it joins.

        Raises:
            ConfigError: the prompt is beyond the engine's limits, or no prompt of this model; or
                `sampling` asks for n answers, for text where there is no tokenizer, for tokens that
                the model does not have, or for structured output that is refused.
            BackendError: structured output is asked for, and llguidance is not installed.
            UnknownAdapterError: no adapter of that name is loaded.
        """
        number, sampling = self._next, sampling_of(sampling)
        if not isinstance(adapter, Lease | str | None):
            raise ConfigError(
                f"adapter is {shown(adapter)}, expected its name, a lease of it, or None for the "
                "base model"
            )
        if sampling.n != 1:
            raise ConfigError(
                f"n is {sampling.n}, and a request has one answer; submit it {sampling.n} times, "
                "each with a seed of its own"
            )
        ids = prompt_ids(f"request {number}", prompt, self._tokenizer, self._manifest)
        sequence = begin_sequence(number, ids, sampling, self._manifest, self._tokenizer)
        most = sequence.most_tokens(self._manifest.max_seq_len - len(ids))
        name, lease = (adapter, None) if not isinstance(adapter, Lease) else (adapter.name, adapter)
        generation = None if lease is None else lease.generation
        request = Request(
            number, name, tuple(ids), sampling, most, self._batcher.steps, generation=generation
        )
        with self._changing_places():
            if lease is not None:
                self._leases[number] = lease
            try:
                self._batcher.submit(request)
            except LoRAError:
                self._leases.pop(number, None)  # it stays its caller's
                raise
            self._next += 1
        return number

    def step(self) -> StepAnswers:
        """Let requests join, and give every row its next token.

        A request that fails ends with its error, and nobody else does. One whose logits are NaN or
        infinite has an OutputError, one whose adapter cannot be read an AdapterError, one whose
        adapter was unloaded while it waited an UnknownAdapterError.

        Where anything else ends a step, such as a failure of the device or an interrupt, every
        request is as it was, and the next step makes it anew; see `Batch.step`.

        Raises:
            BackendError: the engine's run failed.
            StateError: an interrupt came while requests changed places, before.
        """
        self._check_whole()
        try:
            return self._step()
        except BaseException:
            if self._is_torn:
                self._let_go()
            raise

    def _step(self) -> StepAnswers:
        self._is_torn = True
        choice = self._batcher.choose(self._batch.free_rows)
        self._failed |= choice.failed
        for failed in choice.failed:
            self._release_own(failed)
        for running in choice.joined:
            self._start(running)
        given = self._next_tokens()
        tokens = {self._requests[token.row]: token for token in given}
        for token in given:
            if token.finish_reason is not None:
                self._batcher.end(self._forget(token.row))
        answers, self._failed = StepAnswers(tokens, self._failed), {}
        self._is_torn = False
        return answers

    @checked
    def cancel(self, request: int) -> None:
        """Let a request go, whether it waits or runs.

        Raises:
            StateError: it has ended, or there never was one.
        """
        with self._changing_places():
            if request in self._rows:
                self._batch.remove(self._rows[request])
                self._forget(self._rows[request])
            self._batcher.end(request)
            self._release_own(request)

    @checked
    def preempt(self, request: int) -> None:
        """Take the row from a request; it goes on behind its tokens when its turn comes again.

        Its age does not change, so that nothing younger goes before it. Its draws go on, too.

        Raises:
            StateError: it has no row.
        """
        self._check_whole()
        if request not in self._rows:
            raise StateError(f"request {request} has no row; those that have: {list(self._rows)}")
        row = self._rows[request]
        tokens = self._batch.tokens(row)
        with self._changing_places():
            self._batch.remove(row)
            self._forget(row)
            self._batcher.preempt(request, tokens)

    def check_integrity(self) -> None:
        """Raise StateError if requests, rows, leases and slots do not add up."""
        self._check_whole()
        self._batcher.check_integrity()
        rows = {row: request for request, row in self._rows.items()}
        if rows != self._requests or not len(rows) == len(self._batch) == self._batcher.running:
            raise StateError(
                f"{self._batcher.running} requests run in {len(self._batch)} rows: {self._rows}, "
                f"{self._requests}"
            )

    @contextmanager
    def _changing_places(self) -> Iterator[None]:
        """What is refused has changed nothing; what is interrupted cannot go on."""
        self._check_whole()
        self._is_torn = True
        try:
            yield
        except LoRAError:
            self._is_torn = False
            raise
        except BaseException:
            self._let_go()
            raise
        self._is_torn = False

    def _check_whole(self) -> None:
        if self._is_torn:
            self._let_go()  # the interrupt may have come before, or there were two
            raise StateError(
                "this scheduler was interrupted while requests changed places, and has let go of "
                "all of them; make another one, and submit what has not ended"
            )

    def _let_go(self) -> None:
        """Give back every lease, whoever had it at the moment of the interrupt."""
        held = [*self._leases.values(), *self._batcher.leases]
        try:
            self._batch.clear()
        finally:
            for lease in held:
                with suppress(StateError):  # it was given back, and no more
                    self._adapters.release(lease)

    def _start(self, running: Running[Lease]) -> None:
        request = running.request
        self._release_own(request.id)  # the row has its own
        try:
            row = self._batch.add(
                request.prompt,
                request.sampling,
                adapter=running.lease,
                answered=request.answered,
            )
        except LoRAError as error:  # its grammar does not follow the answer so far
            self._failed[request.id] = error
            if running.lease is not None:
                self._adapters.release(running.lease)
            self._batcher.end(request.id)
        else:
            self._rows[request.id], self._requests[row] = row, request.id

    def _next_tokens(self) -> Sequence[Token]:
        """A step of the batch; where rows have no numbers, those of the others, which it holds."""
        returned = self._batch.steps_returned
        while True:
            try:
                return self._batch.step()
            except OutputError as error:
                for row in error.rows:
                    assert isinstance(row, int)  # as the batch numbers them
                    request = self._forget(row)
                    self._failed[request] = error
                    self._batcher.end(request)
            except BaseException:  # the batch is as it was, unless it was just returning tokens
                self._is_torn = self._batch.steps_returned != returned
                raise

    def _release_own(self, request: int) -> None:
        """Give back the lease that a request came with."""
        if (lease := self._leases.pop(request, None)) is not None:
            self._adapters.release(lease)

    def _forget(self, row: int) -> int:
        """Return whose row it was."""
        request = self._requests.pop(row)
        del self._rows[request]
        return request
