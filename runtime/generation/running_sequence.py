"""One sequence of a batch: its parameters, its tokens so far, and what each new one ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.logits.forbidden_tokens import ForbiddenTokens, forbidden_tokens
from trt_lora.runtime.generation.logits.process_logits import processed
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import Logits, generator, next_keys
from trt_lora.runtime.generation.text.answer_text import AnswerText
from trt_lora.runtime.generation.text.structured import Constraint
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, Token
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.manifest import Manifest


@dataclass
class RunningSequence:
    """A sequence under way; what is not given follows from prompt and answer, see `restart`."""

    row: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    answer: list[int]  # all its tokens; first those that were answered before it was added
    answered: int  # how many these are
    index: int  # among the answers to one prompt
    forbidden: ForbiddenTokens
    vocabulary: int
    tokenizer: TextTokenizer | None
    adapter: Lease | None = None  # of its own
    failure: str = ""  # why no token could be chosen
    settled: int = field(init=False)  # tokens of the answer that whole steps have made
    begun: int = field(init=False)  # tokens of the answer that its row was begun behind
    draws: np.random.Generator = field(init=False)
    text: AnswerText | None = field(init=False)
    constraint: Constraint | None = field(init=False)

    def __post_init__(self) -> None:
        """Bring draws, text and grammar to where the answer so far has left them."""
        self.settled = len(self.answer)
        self.restart()

    def restart(self) -> None:
        """Forget what a step that did not end has done; the row is to begin again behind the rest.

        Raises:
            ConfigError: what `structured_outputs` asks for is refused.
            BackendError: llguidance is needed and not installed.
        """
        del self.answer[self.settled :]
        self.begun, self.failure = self.settled, ""
        self.draws = generator(self.sampling.seed, self.prompt, index=self.index)
        next_keys(self.draws, len(self.answer))
        self.text = self._new_text()
        self.constraint = self._new_constraint()
        if self.text is not None:
            for token in self.answer:
                self.text.add(token)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that it was given since it was added."""
        return self.answer[self.answered :]

    def most_tokens(self, room: int) -> int:
        """Return how many tokens the answer may have.

        Args:
            room: tokens that its row has room for, behind those that it was begun with.
        """
        most, fits = self.sampling.max_tokens, self.begun + room
        return fits if most is None else min(most, fits)

    @property
    def is_greedy(self) -> bool:
        """Whether its next token is the first candidate, and nothing else is asked of the logits.

        A step that is begun ahead writes over them; log probabilities may need them all.
        """
        params = self.sampling
        return not params.temperature and not self.changes_logits and params.logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Whether its next token is chosen from other logits than the engine's."""
        return self.sampling.changes_logits or self.forbidden.changes(len(self.answer))

    @property
    def error(self) -> str:
        """Why it cannot go on; empty where it can."""
        return self.failure or ("" if self.constraint is None else self.constraint.error)

    def process(self, logits: Logits) -> Logits:
        """Return the logits [vocab] that its next token is chosen from."""
        if self.constraint is not None:
            logits = self.constraint.masked(logits)
        logits = self.forbidden.apply(logits, self.answer)
        return processed(logits, self.sampling, self.prompt, self.answer)

    def append(self, token: int, most: int, logprobs: Logprobs | None) -> Token:
        """Take the next token, and say whether it is the last.

        Args:
            token: its id.
            most: tokens that the answer may have.
            logprobs: of the token, where asked for.
        """
        if token in self.forbidden.stop_token_ids:
            is_own = token in (self.sampling.stop_token_ids or ())
            return Token(self.row, None, "stop", self._end(), None, token if is_own else None)
        self.answer.append(token)
        if self.constraint is not None:
            self.constraint.accept([token])
        text = self.text.add(token) if self.text is not None else ""
        reason = self._finish_reason(most)
        if reason is not None:
            text += self._end()
        stopped_by = None if self.text is None else self.text.stopped_by
        return Token(self.row, token, reason, text, logprobs, stopped_by)

    def _finish_reason(self, most: int) -> FinishReason | None:
        if self.text is not None and self.text.stopped_by is not None:
            return "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return "stop"
        return None if len(self.answer) < most else "length"

    def _end(self) -> str:
        return "" if self.text is None else self.text.end()

    def _new_text(self) -> AnswerText | None:
        params = self.sampling
        if self.tokenizer is None or not params.detokenize:
            return None
        return AnswerText(
            self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens),
            params.stop_strings,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def _new_constraint(self) -> Constraint | None:
        wanted = self.sampling.structured_outputs
        if wanted is None or self.tokenizer is None:
            return None
        grammars = self.tokenizer.grammars(self.vocabulary, self.forbidden.stop_token_ids)
        constraint = grammars.constraint(wanted)
        constraint.accept(self.answer)
        return constraint


def begin_sequence(
    row: int,
    ids: Sequence[int],
    sampling: SamplingParams,
    manifest: Manifest,
    tokenizer: TextTokenizer | None,
    *,
    answered: int = 0,
    index: int = 0,
) -> RunningSequence:
    """Return a sequence without an adapter.

    Args:
        row: its number.
        ids: its prompt, and behind it what was answered before.
        sampling: its parameters.
        manifest: of the engine.
        tokenizer: of the engine, where tokens are looked at as text.
        answered: how many of the last ids are its answer so far.
        index: among the answers to one prompt.

    Raises:
        ConfigError: a token is none of the model's, a tokenizer is missing, or what
            `structured_outputs` asks for is refused.
        BackendError: llguidance is needed and not installed.
    """
    if sampling.needs_text and tokenizer is None:
        raise ConfigError(
            "stop strings, bad words and structured_outputs look at the text, and this batch has "
            "no tokenizer; pass tokenizer=TextTokenizer(engine.directory)"
        )
    vocabulary = manifest.vocabulary_size
    token_ids("logit_bias", sampling.logit_bias or (), vocabulary)
    own = token_ids("stop_token_ids", sampling.stop_token_ids or (), vocabulary)
    stops = own if sampling.ignore_eos else (*manifest.base_model.stop_token_ids, *own)
    begin = len(ids) - answered
    return RunningSequence(
        row=row,
        sampling=sampling,
        prompt=tuple(ids[:begin]),
        answer=list(ids[begin:]),
        answered=answered,
        index=index,
        forbidden=forbidden_tokens(sampling, stops, vocabulary, tokenizer),
        vocabulary=vocabulary,
        tokenizer=tokenizer,
    )
