"""What a step makes of sequences: a token of each, its text, its log probability."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trt_lora.plugins.short_repr import short_repr

FinishReason = Literal["stop", "length"]


class Logprob(NamedTuple):
    """The log probability of a token: the log softmax of the engine's own logits, in float64.

    Bias, penalties, temperature and grammars do not change it; that is `raw_logprobs` of vLLM.
    """

    logprob: float
    rank: int  # 1 is the greatest logit; of equal ones the lower id comes first


Logprobs = Mapping[int, Logprob]  # by token id: the chosen token, then the most probable ones
PromptLogprobs = tuple[Logprobs | None, ...]


@dataclass(frozen=True)
class Token:
    """What a step made of one sequence."""

    sequence_id: int  # what `submit` has returned
    token_id: int | None  # None where it is a stop token
    finish_reason: FinishReason | None = None  # None: the sequence goes on
    text: str = ""  # that it completes, where there is a tokenizer
    logprobs: Logprobs | None = None  # where asked for
    stop_reason: int | str | None = None  # which of `stop_token_ids` or `stop` has ended it
    # Of each token of the prompt, where asked for, with the first of the answer; of its own first
    # token, which nothing precedes, None.
    prompt_logprobs: PromptLogprobs | None = None
    stop_token: int | None = None  # where it is one


@short_repr
@dataclass(frozen=True)
class StepAnswers:
    """What a step has given requests, by their numbers."""

    tokens: Mapping[int, Token]  # at most one each
    failed: Mapping[int, BaseException]  # why requests have ended without their last token
