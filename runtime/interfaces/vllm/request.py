"""What vLLM's `LLM` is asked for and answers: `LoRARequest`, `RequestOutput` and its parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.token import FinishReason

_REFUSED = {
    "lora_local_path": "it is deprecated in vLLM too; pass lora_path",
    "long_lora_max_len": "an engine has one rotary scaling; leave it out",
    "tensorizer_config_dict": "adapters are read from files; save it with PEFT, pass lora_path",
}


@short_repr
@dataclass(frozen=True)
class LoRARequest:
    """The name, the number and the path of an adapter; with equal fields requests are equal."""

    lora_name: str
    lora_int_id: int  # from 1, one for each adapter
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None  # compared with the engine's when the adapter is loaded
    tensorizer_config_dict: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            AdapterError: (a ValueError) the id is below 1, there is no path, or a field asks for
                what is not supported.
        """
        check_fields(self)
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise AdapterError(f"id must be > 0, got {shown(self.lora_int_id)}")
        for field, instead in _REFUSED.items():
            if (value := getattr(self, field)) is not None:
                raise AdapterError(f"{field} is {shown(value)}: {instead}")
        if not self.lora_path:
            raise AdapterError("lora_path cannot be empty")

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


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
