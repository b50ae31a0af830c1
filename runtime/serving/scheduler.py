"""Scheduler: continuous batching, each request with an adapter of its own."""

import itertools
import threading
from collections import abc
from functools import partial

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError, StateError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.chosen_tokens import (
    ChosenToken,
    StepOutput,
    append_tokens,
    choose_tokens,
    grammar_exhausted,
    non_finite_logits,
)
from trt_lora.runtime.generation.decoding.kv_cache import Prefix
from trt_lora.runtime.generation.decoding.rows import RowCounts, Rows
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.sequence import Sequence, new_sequence, prepare_grammars
from trt_lora.runtime.generation.sources import Source, source_array
from trt_lora.runtime.generation.text.prompts import Prompt, prompt_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.serving.active_sequences import ActiveSequences
from trt_lora.runtime.serving.admission import AdmissionPolicy
from trt_lora.runtime.serving.serving_config import ServingConfig, prompt_budget, row_count
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore

_Run = abc.Callable[[], list[StepOutput]]
_GoOn = abc.Callable[[list[ChosenToken]], None]


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

    On a GPU tokens are chosen from 256 candidates a row; logits come to the host only where those
    do not tell. Where no prompt waits, the next step is begun once tokens are chosen, before text
    is made of them; where all sequences are greedy and ask for nothing else, before the host looks
    at them. Tokens are those of the same steps one by one; for each sequence that ends at most one
    overlapped step is discarded, none for an end by length.

    A step is made as a whole or not at all: where anything ends it, an interrupt too, every
    sequence is as it was, and the next step runs its prompt and its answer again. Tokens that were
    chosen by then come with the next step. See `ActiveSequences` for the one exception.

    Not for several threads at a time; but any thread may load, replace, unload and pin adapters.
    """

    @checked
    def __init__(
        self,
        engine: Executor,
        adapters: AdapterStore,
        config: ServingConfig | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """Make room for rows.

        Args:
            engine: a running engine.
            adapters: its store; requests name them.
            config: see there.
            tokenizer: of the engine's directory: tokens then come with their text. Stop strings
                and structured output need one.

        Raises:
            ConfigError: a number is beyond the engine's limits.
            BackendError: the device has no room for the cache.
        """
        config = config or ServingConfig()
        self._manifest, self._tokenizer, self._adapters = engine.manifest, tokenizer, adapters
        count = row_count(config, self._manifest)
        self._budget = partial(prompt_budget, config, engine.memory)
        self._rows = Rows(engine, adapters, count, shares_prefixes=config.shares_prefixes)
        policy = AdmissionPolicy(adapters, config)
        self._active = ActiveSequences(policy, self._rows, adapters)
        self._held: list[Token] = []  # that no step has returned yet
        self._is_returned = False  # by the last step: they have reached the caller
        self._unsettled: list[Token] = []  # chosen, and not held yet
        self._is_torn = False  # a run has begun, and its tokens are not taken
        self._numbers = itertools.count()
        self.is_stalled = False  # nothing can go on until `progress` is set, or `next_time`
        self.progress = threading.Event()  # set when an adapter came, or was let go of
        adapters.bindings.watch(self.progress)

    def __len__(self) -> int:
        """How many requests wait or run."""
        return len(self._active.by_id)

    def __contains__(self, request: object) -> bool:
        """Whether a request waits or runs."""
        return request in self._active.by_id

    @property
    def running(self) -> int:
        """How many requests have a row."""
        return len(self._rows.cache.owners)

    @property
    def ids(self) -> tuple[int, ...]:
        """The requests that wait or run."""
        return tuple(self._active.by_id)

    @property
    def shared_tokens(self) -> int:
        """How many tokens of prompts were not run: other requests had begun with them."""
        return self._rows.counts.shared

    @property
    def kept(self) -> tuple[Prefix, ...]:
        """What rows that nobody uses keep of sequences that have ended."""
        return tuple(self._rows.cache.prefixes.values())

    @property
    def counts(self) -> RowCounts:
        """What its steps have run so far; it is the scheduler's own."""
        return self._rows.counts

    @checked
    def tokens(self, request: int) -> tuple[int, ...]:
        """Return the token ids that a request was given so far.

        Raises:
            StateError: it has ended, or there never was one.
        """
        return tuple(self._active[request].answer)

    @checked
    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: Lease | str | None = None,
        client: str | None = None,
        salt: str | None = None,
        source: Source | None = None,
    ) -> int:
        """Let a request wait for its turn; return its number.

        Args:
            prompt: token ids, or with a tokenizer a user's message or a conversation.
            sampling: how its tokens are chosen; greedy and 64 tokens by default.
            adapter: by name, or as a lease, which the request then owns; the base model by default.
                "json@0.5" is an adapter at another strength.
            client: whose request it is; clients share the rows by what they have received.
            salt: prefixes are shared among requests with the same one.
            source: what the encoder of an encoder-decoder reads; see `Engine.generate`.

        Raises:
            ConfigError: prompt or source are beyond the engine's limits, or none of this model; or
                `sampling` asks for n answers, for text where there is no tokenizer, for tokens
                that the model does not have, or for structured output that is refused.
            BackendError: structured output is asked for, and llguidance is not installed.
            UnknownAdapterError: no adapter of that name is loaded.
        """
        params = sampling_of(sampling)
        if params.n != 1:
            raise ConfigError(f"n is {params.n}, and submit takes one request; call submit_all")
        (request,) = self.requests(
            prompt, params, adapter=adapter, client=client, salt=salt, source=source
        )
        self.add(request)
        return request.id

    @checked
    def submit_all(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        client: str | None = None,
        salt: str | None = None,
        source: Source | None = None,
    ) -> tuple[int, ...]:
        """Submit `sampling.n` requests of one prompt, or none; return their numbers.

        The prompt is run once. Each draws for itself; the first as it would alone.

        Arguments and errors are those of `submit`; the adapter is one by name.
        """
        requests = self.requests(
            prompt, sampling, adapter=adapter, client=client, salt=salt, source=source
        )
        self._mend()
        self._active.add_all(requests)
        return tuple(request.id for request in requests)

    @checked
    def requests(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: Lease | str | None = None,
        client: str | None = None,
        salt: str | None = None,
        source: Source | None = None,
    ) -> list[Sequence]:
        """Return `sampling.n` requests of one prompt for `add`; any thread may call it.

        Raises:
            ConfigError, BackendError, UnknownAdapterError: as `submit`.
        """
        params, lease = sampling_of(sampling), adapter if isinstance(adapter, Lease) else None
        name = adapter.name if isinstance(adapter, Lease) else adapter
        if name is not None and lease is None:
            self._adapters.info(name)
        ids = tuple(prompt_ids("the prompt", prompt, self._tokenizer, self._manifest))
        read = source_array("the prompt", source, self._tokenizer, self._manifest)
        made = partial(new_sequence, ids, params, self._manifest, self._tokenizer, source=read)
        found = [made(index=index) for index in range(params.n)]
        for sequence in found:
            sequence.id, sequence.client, sequence.salt = next(self._numbers), client, salt
            sequence.adapter, sequence.lease = name, lease
            sequence.version = None if lease is None else lease.version
        return found

    def prepare(self) -> None:
        """Do what first requests wait for: read the tokenizer for structured output, warm up a GPU.

        A GPU only where no request has come yet.

        Raises:
            BackendError: the device is out of memory.
        """
        prepare_grammars(self._tokenizer, self._manifest)
        if not self:
            self._rows.warm_up()

    @checked
    def add(self, request: Sequence) -> None:
        """Let a request wait for its turn.

        Raises:
            UnknownAdapterError: its adapter was unloaded since.
            StateError: its adapter can never have a slot.
        """
        self._mend()
        self._active.add(request)

    @checked
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
            self._is_returned = True
            return self._answers()
        except BaseException:
            self._is_returned = False
            self._active.let_go_if_torn()
            raise

    @checked
    def cancel(self, request: int) -> None:
        """Let a request go, whether it waits or runs.

        Raises:
            StateError: it has ended, or there never was one.
        """
        self._mend()
        self._active.end([self._active[request]])

    @checked
    def preempt(self, request: int) -> None:
        """Take the row from a request; it goes on behind its tokens when its turn comes again.

        Its age does not change, so that nothing younger goes before it. Its draws go on, too.

        Raises:
            StateError: it has no row.
        """
        self._mend()
        running = {sequence.id: sequence for sequence in self._active.running}
        if request not in running:
            raise StateError(f"request {request} has no row; those that have: {list(running)}")
        self._active.preempt(running[request])

    def clear(self) -> None:
        """Let all requests go."""
        self._mend()
        self._active.end(list(self._active.by_id.values()))

    def check_integrity(self) -> None:
        """Raise StateError if requests, rows, leases and slots do not add up."""
        self._mend()
        self._active.check_integrity()

    @checked
    def sleep(self, most_s: float | None = None) -> None:
        """Sleep until `progress` is set or a request has waited too long, `most_s` seconds most."""
        bounds = [most_s, self._active.policy.seconds_left() if self else None]
        self.progress.wait(min((bound for bound in bounds if bound is not None), default=None))

    @checked
    def fail_running(self, error: BaseException) -> StepAnswers:
        """End all requests that have a row with an error that belongs to none of them."""
        self._is_torn, self._unsettled = False, []
        return StepAnswers({}, {sequence.id: error for sequence in self._active.end_running()})

    def _step(self, deliver: abc.Callable[[StepAnswers], None] | None) -> None:
        for sequence in [s for s in self._active.running if s.error]:
            self._active.end([sequence], grammar_exhausted(sequence))
        self.progress.clear()
        changed = self._active.schedule()
        self.is_stalled = not changed and not self._active.running and len(self) > 0
        decoded = self._take(self._rows.decode, self._rows.launch_next)
        if waiting := self._rows.waiting:
            if deliver is not None:
                answers = self._answers()
                self._held, self._active.failed = [], {}
                deliver(answers)
            budget = self._budget(decoded=decoded, waiting=waiting)
            self._take(partial(self._rows.prefill, budget))

    def _take(self, run: _Run, go_on: _GoOn | None = None) -> int:
        """Run something of a step, and choose what sequences are given; `go_on` is told first.

        Returns:
            How many there were.
        """
        self._is_torn = True
        chosen, wrong = choose_tokens(run())
        if go_on is not None:
            go_on(chosen)
        self._unsettled = append_tokens(chosen)
        if chosen:
            self._settle()
        if wrong:
            self._active.end(wrong, non_finite_logits(wrong), clear=True)
        self._is_torn = False
        return len(chosen)

    def _settle(self) -> None:
        """Keep what a run has chosen, and let go of the sequences that have ended."""
        for sequence in self._active.running:
            self._active.policy.charge(sequence, len(sequence.answer) - sequence.settled)
            sequence.settled = len(sequence.answer)
        held = {token.sequence_id for token in self._held}
        self._held += [token for token in self._unsettled if token.sequence_id not in held]
        ended = [
            t.sequence_id
            for t in self._unsettled
            if t.finish_reason is not None and t.sequence_id in self
        ]
        self._active.end(self._active[number] for number in ended)
        self._unsettled = []

    def _answers(self) -> StepAnswers:
        return StepAnswers({t.sequence_id: t for t in self._held}, dict(self._active.failed))

    def _mend(self) -> None:
        """Forget what has reached the caller, and begin rows again whose last run did not end.

        Raises:
            StateError: requests were changing places when an interrupt came.
        """
        self._active.check_whole()
        if self._is_returned:
            self._held, self._active.failed, self._is_returned = [], {}, False
        if self._unsettled:
            self._settle()
        if self._is_torn:
            self._active.restart()
            self._is_torn = False
