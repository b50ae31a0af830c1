"""Choice: one answer as far as it has come, how many tokens there were, and how long they took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_lora.runtime.generation.token import PromptLogprobs, Token
from trt_lora.runtime.server.answers.encoding import EncodedPrompt
from trt_lora.runtime.server.engine_process.wire import RequestTimes


@dataclass
class Choice:
    """One answer so far."""

    prompt: EncodedPrompt
    max_tokens: int = 0  # that it may have
    tokens: list[Token] = field(default_factory=list)  # a stop token, without an id, is the last
    prompt_logprobs: PromptLogprobs | None = None
    times: RequestTimes | None = None  # so far, as the engine measured them
    first_at: float = 0.0  # when tokens came here, in seconds of one clock
    last_at: float = 0.0
    told: int = 0  # tokens that are in an event
    listed: int = 0  # characters of the tokens that were told with their log probabilities

    def add(self, token: Token, at: float = 0.0) -> None:
        """Take the next token."""
        if not self.tokens:
            self.first_at, self.prompt_logprobs = at, token.prompt_logprobs
        self.tokens.append(token)
        self.last_at = at

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(token.text for token in self.tokens)

    def told_times(self) -> dict[str, float]:
        """Return vLLM's times of a request, in ms; what cannot be told is left out."""
        if self.times is None:
            return {}
        times, count = self.times, len(self.tokens)
        found = {
            "time_to_first_token_ms": times.prefill_s * 1000,
            "generation_time_ms": times.decode_s * 1000,
            "queue_time_ms": times.queue_s * 1000,
        }
        if count > 1:
            found["mean_itl_ms"] = times.decode_s / (count - 1) * 1000
        if whole := times.prefill_s + times.decode_s:
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
    cached = sum(choice.times.cached_tokens for choice in prompts if choice.times)
    return counted | {"prompt_tokens_details": {"cached_tokens": cached}}
