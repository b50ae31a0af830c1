"""One sequence of a batch: its parameters, its tokens so far, and what each new one ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.logits.process_logits import processed
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import Logits, generator
from trt_lora.runtime.generation.text.answer_text import AnswerText
from trt_lora.runtime.generation.text.structured import Constraint
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, Token
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.manifest import Manifest


@dataclass
class RunningSequence:
    """A sequence under way."""

    row: int
    sampling: SamplingParams
    adapter: Lease | None  # of its own
    prompt: tuple[int, ...]
    answered: tuple[int, ...]  # what was answered before it was added
    stop_token_ids: tuple[int, ...]
    draws: np.random.Generator
    text: AnswerText | None
    constraint: Constraint | None
    tokens: list[int] = field(default_factory=list)

    @property
    def most_tokens(self) -> int:
        """How many tokens it may have, by its own parameters."""
        return self.sampling.max_new_tokens - len(self.answered)

    @property
    def is_greedy(self) -> bool:
        """Whether its next token is the first candidate, and nothing else is asked of the logits.

        A step that is begun ahead writes over them; log probabilities may need them all.
        """
        params = self.sampling
        return not params.temperature and not params.changes_logits and params.logprobs is None

    @property
    def error(self) -> str:
        """Why it cannot go on; empty where it can."""
        return "" if self.constraint is None else self.constraint.error

    def process(self, logits: Logits) -> Logits:
        """Return the logits [vocab] that its next token is chosen from."""
        if self.constraint is not None:
            logits = self.constraint.masked(logits)
        return processed(logits, self.sampling, self.prompt, (*self.answered, *self.tokens))

    def append(self, token: int, most: int, logprobs: Logprobs | None) -> Token:
        """Take the next token, and say whether it is the last.

        Args:
            token: its id.
            most: tokens that the sequence may have.
            logprobs: of the token, where asked for.
        """
        if token in self.stop_token_ids:
            return Token(self.row, None, "stop", self._end())
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.accept([token])
        text = self.text.add(token) if self.text is not None else ""
        reason = self._finish_reason(most)
        if reason is not None:
            text += self._end()
        return Token(self.row, token, reason, text, logprobs)

    def _finish_reason(self, most: int) -> FinishReason | None:
        if self.text is not None and self.text.is_stopped:
            return "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return "stop"
        return None if len(self.tokens) < most else "length"

    def _end(self) -> str:
        return "" if self.text is None else self.text.end()


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
            "stop strings and structured_outputs look at the text, and this batch has no "
            "tokenizer; pass tokenizer=TextTokenizer(engine.directory)"
        )
    token_ids("logit_bias", sampling.logit_bias or (), manifest.vocabulary_size)
    begin = len(ids) - answered
    sequence = RunningSequence(
        row,
        sampling,
        None,
        tuple(ids[:begin]),
        tuple(ids[begin:]),
        _stop_token_ids(manifest, sampling),
        generator(sampling.seed, ids, answered, index),
        AnswerText(tokenizer.stream(), sampling.stop_strings) if tokenizer is not None else None,
        None,
    )
    _constrain(sequence, manifest, tokenizer)
    _repeat(sequence)
    return sequence


def _constrain(
    sequence: RunningSequence, manifest: Manifest, tokenizer: TextTokenizer | None
) -> None:
    wanted = sequence.sampling.structured_outputs
    if wanted is not None and tokenizer is not None:
        grammars = tokenizer.grammars(manifest.vocabulary_size, sequence.stop_token_ids)
        sequence.constraint = grammars.constraint(wanted)


def _repeat(sequence: RunningSequence) -> None:
    """Bring text and grammar to where the answer so far has left them."""
    for token in sequence.answered:
        if sequence.text is not None:
            sequence.text.add(token)
    if sequence.constraint is not None:
        sequence.constraint.accept(sequence.answered)


def _stop_token_ids(manifest: Manifest, sampling: SamplingParams) -> tuple[int, ...]:
    if sampling.stop_token_ids is None:
        return manifest.base_model.stop_token_ids
    return token_ids("stop_token_ids", sampling.stop_token_ids, manifest.vocabulary_size)
