"""Choice: one answer as far as it has come, how many tokens there were, and how long they took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_lora.runtime.generation.token import Beginning, PromptLogprobs, Token
from trt_lora.runtime.server.answers.encoding import EncodedPrompt

_AT_ONCE = Beginning(cached_tokens=0, queued_s=0.0)


@dataclass
class Choice:
    """One answer so far; times are seconds of one clock."""

    prompt: EncodedPrompt
    submitted_at: float = 0.0
    max_tokens: int = 0  # that it may have
    tokens: list[Token] = field(default_factory=list)  # a stop token, without an id, is the last
    prompt_logprobs: PromptLogprobs | None = None
    began: Beginning = _AT_ONCE
    first_at: float = 0.0
    last_at: float = 0.0
    told: int = 0  # tokens that are in an event
    listed: int = 0  # characters of the tokens that were told with their log probabilities

    def add(self, token: Token, at: float = 0.0) -> None:
        """Take the next token."""
        if not self.tokens:
            self.first_at, self.prompt_logprobs = at, token.prompt_logprobs
            self.began = token.began or self.began
        self.tokens.append(token)
        self.last_at = at

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(token.text for token in self.tokens)

    def times(self) -> dict[str, float]:
        """Return vLLM's times of a request, in ms; what cannot be told is left out."""
        row_at, count = self.submitted_at + self.began.queued_s, len(self.tokens)
        answering, whole = self.last_at - self.first_at, self.last_at - row_at
        found = {
            "time_to_first_token_ms": max(self.first_at - row_at, 0.0) * 1000,
            "generation_time_ms": answering * 1000,
            "queue_time_ms": self.began.queued_s * 1000,
        }
        if count > 1:
            found["mean_itl_ms"] = answering / (count - 1) * 1000
        if whole > 0:
            found["tokens_per_second"] = count / whole
        return found


def usage(choices: Sequence[Choice], *, details: bool = False) -> dict[str, Any]:
    """Return how many tokens went in and came out; a prompt of n answers counts once."""
    prompts = {id(choice.prompt): choice for choice in reversed(choices)}.values()  # the first of n
    given = sum(len(choice.prompt.ids) for choice in prompts)
    made = sum(len(choice.tokens) for choice in choices)
    counted = {"prompt_tokens": given, "total_tokens": given + made, "completion_tokens": made}
    if not details:
        return counted
    cached = sum(choice.began.cached_tokens for choice in prompts)
    return counted | {"prompt_tokens_details": {"cached_tokens": cached}}
