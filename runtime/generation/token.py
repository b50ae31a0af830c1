"""What a step makes of one sequence: a token, its text, its log probability."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token: the log softmax of the engine's own logits, in float64.

    Bias, penalties, temperature and grammars do not change it; that is `raw_logprobs` of vLLM.
    """

    logprob: float
    rank: int  # 1 is the greatest logit; of equal ones the lower id comes first


Logprobs = Mapping[int, Logprob]  # by token id: the chosen token, then the most probable ones


@dataclass(frozen=True)
class Token:
    """What a step made of one sequence."""

    row: int  # as `Batch.add` returned it
    token_id: int | None  # None where it is a stop token
    finish_reason: FinishReason | None = None  # None: the sequence goes on
    text: str = ""  # that it completes, where the batch has a tokenizer
    logprobs: Logprobs | None = None  # where asked for, and of no stop token
    stop_reason: int | str | None = None  # which of `stop_token_ids` or `stop` has ended it
