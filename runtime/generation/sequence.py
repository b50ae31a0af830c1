"""Sequence: one request, from its submission to its last token."""

from collections import abc
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT
from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.logits.changed_logits import (
    ForbiddenTokens,
    apply_penalties,
    forbidden_tokens,
)
from trt_lora.runtime.generation.logits.token_rules import apply_rules, rules_change
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import generator, next_keys
from trt_lora.runtime.generation.text.answer_text import AnswerText
from trt_lora.runtime.generation.text.structured import Constraint
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, Token
from trt_lora.runtime.manifest import Manifest, TokenRules
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.store.entry import Lease


@dataclass(eq=False)
class Sequence:
    """A request on its way: what was asked, what it was given, and what it holds.

    It waits, it runs in a row of the KV cache, it may wait again; its answer, its draws, its text
    and its grammar stay with it. What a step that did not end has done to them, `restart` forgets.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    most: int  # tokens that its answer may have
    forbidden: ForbiddenTokens
    stop_token_ids: tuple[int, ...]  # all that end it
    tokenizer: TextTokenizer | None = None
    constraint: Constraint | None = None  # what its answer has to be
    source: Array | None = None  # that an encoder reads: token ids [s] or features [bins, frames]
    is_encoded: bool = False  # whether its row has the cross cache of its source
    rules: TokenRules | None = None  # the model's own, of an encoder-decoder
    id: int = -1  # ascends in the order of arrival, from 0 on
    adapter: str | None = None  # by name; None is the base model, or what all have
    version: int | None = None  # that the adapter must have: it has given tokens already
    client: str | None = None  # who shares the rows with others
    salt: str | None = None  # prefixes are shared among those of one salt
    arrival: int = 0  # the step before which it came
    arrived_at: float = 0.0  # the same on a monotonic clock, seconds, as those that follow
    ready_at: float = 0.0  # when its adapter had come, where that had to be waited for
    joined_at: float = 0.0  # when it had a row for the first time
    answered_by: int | None = None  # the version of its adapter, once it has a row
    lease: Lease | None = None  # of its adapter, as long as it has a row or came with it
    answer: list[int] = field(default_factory=list)
    settled: int = 0  # tokens of the answer that whole steps have made
    pending: list[int] = field(default_factory=list)  # tokens that its row lacks
    leader: "Sequence | None" = None  # of the same prompt, which is run for both
    key: abc.Hashable = None  # of adapter and salt: rows of one key may share prefixes
    slot: int = BASE_SLOT  # of its adapter, once its prompt was run
    failure: str = ""  # why no token could be chosen
    cached_tokens: int | None = None  # of its prompt, not run when it had a row for the first time
    prompt_logprobs: list[Logprobs | None] | None = None  # so far, where they are asked for
    draws: np.random.Generator = field(init=False)
    text: AnswerText | None = field(init=False)

    def __post_init__(self) -> None:
        """Bring draws, text and grammar to where the answer so far has left them."""
        self.settled = len(self.answer)
        self.restart()

    def restart(self) -> None:
        """Forget what a step that did not end has done; its row has nothing any more."""
        del self.answer[self.settled :]
        self.failure, self.leader = "", None
        self.pending = [*self.prompt, *self.answer]
        self.draws = generator(self.sampling.seed, self.prompt)
        next_keys(self.draws, len(self.answer))
        self.text = self._new_text()
        if self.text is not None:
            for token in self.answer:
                self.text.add(token)
        if self.constraint is not None:
            self.constraint.restart(self.answer)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its prompt and its answer so far."""
        return (*self.prompt, *self.answer)

    @property
    def left(self) -> int:
        """How many more tokens its answer may have."""
        return self.most - len(self.answer)

    @property
    def temperature(self) -> float:
        """Of its draws; 0 is greedy."""
        return self.sampling.temperature

    @property
    def is_greedy(self) -> bool:
        """Whether its next token is the first candidate, and nothing else is asked of the logits.

        A step that is begun ahead writes over them; log probabilities may need them all.
        """
        params = self.sampling
        return not params.temperature and not self.changes_logits and params.listed_logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Whether its next token is chosen from other logits than the engine's."""
        length = len(self.answer)
        return (
            self.sampling.changes_logits
            or self.forbidden.changes(length)
            or (
                self.rules is not None
                and rules_change(self.rules, len(self.prompt), length, self.left)
            )
        )

    @property
    def error(self) -> str:
        """Why it cannot go on; empty where it can."""
        return self.failure or ("" if self.constraint is None else self.constraint.error)

    def process(self, logits: Logits) -> Logits:
        """Return the logits [vocab] that its next token is chosen from."""
        if self.constraint is not None:
            logits = self.constraint.masked(logits)
        if self.forbidden.changes(len(self.answer)):
            logits = self.forbidden.apply(logits, self.answer)
        if self.sampling.changes_scores:
            logits = apply_penalties(logits, self.sampling, self.prompt, self.answer)
        if self.rules is not None:
            sizes = len(self.prompt), len(self.answer), self.left
            logits = apply_rules(self.rules, logits, *sizes)
        return logits

    def append(self, token: int, logprobs: Logprobs | None) -> Token:
        """Take the next token, and say whether it is the last."""
        if token in self.stop_token_ids:
            is_own = token in (self.sampling.stop_token_ids or ())
            stopped_by = token if is_own else None
            text = self._end(token)
            return Token(self.id, None, "stop", text, logprobs, stopped_by, stop_token=token)
        self.answer.append(token)
        self.pending = [token]
        if self.constraint is not None:
            self.constraint.accept([token])
        text = self.text.add(token) if self.text is not None else ""
        reason = self._finish_reason()
        if reason is not None:
            text += self._end()
        string = None if self.text is None else self.text.stopped_by
        return Token(self.id, token, reason, text, logprobs, string)

    def _finish_reason(self) -> FinishReason | None:
        if self.text is not None and self.text.stopped_by is not None:
            return "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return "stop"
        return None if self.left > 0 else "length"

    def _end(self, stop: int | None = None) -> str:
        """The text that was held back, behind that of a stop token where this is asked for."""
        if self.text is None:
            return ""
        is_shown = self.sampling.include_stop_str_in_output
        shown = self.text.add(stop) if stop is not None and is_shown else ""
        return shown + self.text.end()

    def _new_text(self) -> AnswerText | None:
        params = self.sampling
        if self.tokenizer is None or not params.detokenize:
            return None
        stream = self.tokenizer.stream(
            self.prompt,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return AnswerText(
            stream,
            params.stop_strings,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )


def new_sequence(
    ids: abc.Sequence[int],
    sampling: SamplingParams,
    manifest: Manifest,
    tokenizer: TextTokenizer | None,
    *,
    index: int = 0,
    source: Array | None = None,
) -> Sequence:
    """Return a sequence of the base model that has no token yet.

    Args:
        ids: its prompt.
        sampling: its parameters.
        manifest: of the engine.
        tokenizer: of the engine, where tokens are looked at as text.
        index: among the answers to one prompt: their seeds follow one another.
        source: that the engine's encoder reads, as `source_array` returns it.

    Raises:
        ConfigError: a token is none of the model's, a tokenizer is missing, or what
            `structured_outputs` asks for is refused.
        BackendError: llguidance is needed and not installed.
    """
    if sampling.needs_text and tokenizer is None:
        raise ConfigError(
            "stop strings, bad words and structured_outputs look at the text, and there is no "
            "tokenizer; pass tokenizer=TextTokenizer(engine.directory)"
        )
    vocabulary = manifest.vocabulary_size
    for name in ("logit_bias", "logprob_token_ids"):
        token_ids(name, getattr(sampling, name) or (), vocabulary)
    own = token_ids("stop_token_ids", sampling.stop_token_ids or (), vocabulary)
    both = (*manifest.base_model.stop_token_ids, *own)
    stops = own if sampling.ignore_eos else both
    constraint = None
    if sampling.structured_outputs is not None and tokenizer is not None:
        grammars = tokenizer.grammars(vocabulary, _stop(manifest, own))
        constraint = grammars.constraint(sampling.structured_outputs, stops)
    room = manifest.max_seq_len - len(ids)
    if sampling.seed is not None and index:
        sampling = replace(sampling, seed=(sampling.seed + index) % (1 << 64))
    return Sequence(
        prompt=tuple(ids),
        sampling=sampling,
        most=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        forbidden=forbidden_tokens(sampling, both, vocabulary, tokenizer),
        stop_token_ids=stops,
        tokenizer=tokenizer,
        constraint=constraint,
        source=source,
        rules=manifest.encoder.rules if manifest.encoder else None,
    )


def prepare_grammars(tokenizer: TextTokenizer | None, manifest: Manifest) -> None:
    """Read a tokenizer for structured output, if that is installed; all threads wait meanwhile."""
    if tokenizer is not None:
        with suppress(BackendError, ConfigError):
            tokenizer.grammars(manifest.vocabulary_size, _stop(manifest))


def _stop(manifest: Manifest, own: tuple[int, ...] = ()) -> int:
    """A token that is no text, for llguidance; without one no answer can be structured."""
    return (*manifest.base_model.stop_token_ids, *own, 0)[0]
