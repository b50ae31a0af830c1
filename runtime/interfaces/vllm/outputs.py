"""vLLM's `RequestOutput` and `CompletionOutput`: what `LLM` answers."""

from collections.abc import Mapping
from dataclasses import dataclass

from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.token import FinishReason
from trt_lora.runtime.interfaces.vllm.request import LoRARequest


@short_repr
@dataclass(frozen=True)
class TokenLogprob:
    """vLLM's `Logprob`: of a token, with its place among all and its text."""

    logprob: float
    rank: int  # 1 is the greatest
    decoded_token: str


PromptTokenLogprobs = list[Mapping[int, TokenLogprob] | None]  # None: of the first, after nothing


@short_repr
@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]  # without the stop token, which is among vLLM's
    cumulative_logprob: float | None  # where log probabilities are asked for
    logprobs: list[Mapping[int, TokenLogprob]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # which of `stop_token_ids` or `stop` has ended it
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Return True: answers come whole."""
        return True


@short_repr
@dataclass(frozen=True)
class RequestOutput:
    """The answers to a prompt."""

    request_id: str
    prompt: str | None  # None where it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    lora_request: LoRARequest | None = None
    prompt_logprobs: PromptTokenLogprobs | None = None  # where asked for
    finished: bool = True
