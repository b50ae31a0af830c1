"""Parameters of one answer: how its tokens are chosen, and where it ends.

Names, order and defaults are those of `SamplingParams` of vLLM 0.33, all of them; those for which
nothing here does the work are refused where they are not at their default.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.generation.text.token_ids import token_ids

_MOST_LISTED = 128  # of `logprob_token_ids`, as in vLLM
_MOST_BIAS = float(np.finfo(np.float32).max)

# The least and the most of a number, and both in words.
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "n": (1, np.inf, "1 or more"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
    "repetition_penalty": (np.nextafter(0, 1), np.finfo(float).max, "above 0, and finite"),
    "temperature": (0, np.finfo(float).max, "0 (greedy) or more, and finite"),
    "top_p": (np.nextafter(0, 1), 1, "above 0 and at most 1"),
    "top_k": (0, np.inf, "0 or -1 (all), or more"),
    "min_p": (0, 1, "from 0 (all) to 1"),
    "seed": (-(1 << 63), (1 << 64) - 1, "a number of 64 bits, or None for another one each time"),
    "max_tokens": (1, np.inf, "1 or more, or None for as many as the engine has room for"),
    "min_tokens": (0, np.inf, "0 or more"),
    "logprobs": (-1, np.inf, "-1 (all tokens) or more"),
    "prompt_logprobs": (-1, np.inf, "-1 (all tokens) or more"),
}

# Why a field of vLLM's is refused where it is not at its default.
REFUSED: Mapping[str, str] = {
    "watermarking": "answers carry no watermark; leave it out",
    "prompt_logprob_token_ids": "log probabilities are of the prompt and the best; leave it out",
    "prompt_logprob_start": "log probabilities are of the whole prompt; leave it out",
    "flat_logprobs": "log probabilities are dicts by token; leave it out",
    "output_kind": "generate returns answers whole, stream by piece; leave it out",
    "stream_interval": "stream yields text as it comes; leave it out",
    "skip_clone": "parameters are frozen, and never copied; leave it out",
    "output_text_buffer_length": "it follows from stop; leave it out",
    "extra_args": "nothing here reads it; leave it out",
    "skip_reading_prefix_cache": "pass a salt of its own to the scheduler; leave it out",
    "thinking_token_budget": "thinking is not told from answering; pass max_tokens",
    "repetition_detection": "no answer is ended for repeating; pass max_tokens or a penalty",
    "routed_experts_prompt_start": "no engine returns its experts; leave it out",
    "trace_decode_token_ids": "tokens are chosen, not given; leave it out",
}


@short_repr
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a generation."""

    n: int = 1  # answers to one prompt, with draws of their own
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # the same, times how often a token is in the answer
    repetition_penalty: float = 1.0  # of tokens in prompt or answer; above 1 makes them rarer
    temperature: float = 1.0  # 0 is greedy
    watermarking: bool | None = None
    top_p: float = 1.0  # 1 keeps all
    top_k: int = 0  # 0 and -1 keep all
    min_p: float = 0.0  # least probability in parts of the greatest; 0 keeps all
    seed: int | None = None  # None and -1: another one each time
    stop: str | Sequence[str] | None = None  # strings that end the text, which ends before them
    stop_token_ids: Collection[int] | None = None  # that end it beside the engine's own
    ignore_eos: bool = False  # the engine's own stop tokens do not end it
    max_tokens: int | None = 16  # None: as many as the engine has room for
    min_tokens: int = 0  # before which no stop token is chosen and no stop string ends
    logprobs: int | None = None  # tokens a step with log probabilities; the chosen one comes too
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, which is run for it
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None  # these tokens instead of the best
    flat_logprobs: bool = False
    detokenize: bool = True  # make text, where there is a tokenizer
    skip_special_tokens: bool = True  # in the text
    spaces_between_special_tokens: bool = True  # in the text, where they are not skipped
    include_stop_str_in_output: bool = False  # the text ends behind the stop string or token
    output_kind: object = None
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: Collection[int] | None = None  # the only ones that are chosen
    extra_args: Mapping[str, object] | None = None
    bad_words: Sequence[str] | None = None  # that the text never has
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse values without a meaning, and keep collections as tuples.

        Raises:
            ConfigError: a value is of another type, out of its range, contradicts another, or asks
                for what is not done here.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            is_default = type(value) is type(field.default) and value == field.default
            if field.name in REFUSED and not is_default:
                raise ConfigError(f"{field.name} is {shown(value)}: {REFUSED[field.name]}")
        check_fields(self)
        for name, off in (("seed", None), ("top_k", 0)):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, off)
        for name, (least, most, choices) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {shown(value)}, expected {choices}")
        for name, converted in _CONVERTED.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, converted(name, value))
        self._check_contradictions()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return tuple(self.stop or ())

    @property
    def listed_logprobs(self) -> int | Sequence[int] | None:
        """Which tokens of a step have log probabilities beside the chosen: these, or so many."""
        return self.logprob_token_ids or self.logprobs

    @property
    def needs_text(self) -> bool:
        """Whether tokens are looked at as text, for which a tokenizer is needed."""
        return bool(self.stop or self.bad_words) or self.structured_outputs is not None

    @property
    def changes_scores(self) -> bool:
        """Whether bias or penalties change logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the engine's."""
        is_limited = self.allowed_token_ids is not None or self.structured_outputs is not None
        return self.changes_scores or is_limited or bool(self.bad_words)

    def _check_contradictions(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"n is {self.n}, but temperature 0 (greedy) gives equal answers; pass a "
                "temperature above 0, or n=1"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; pass "
                "fewer, or a larger max_tokens"
            )
        if self.stop and not self.detokenize:
            raise ConfigError(
                f"stop is {shown(self.stop)}, strings of the text that detokenize=False leaves "
                "out; pass stop_token_ids, or detokenize=True"
            )
        listed = len(self.logprob_token_ids or ())
        if listed > _MOST_LISTED or (listed and self.logprobs not in (None, listed)):
            raise ConfigError(
                f"logprob_token_ids has {listed} tokens and logprobs is {self.logprobs}; expected "
                f"{_MOST_LISTED} at most, and as many logprobs or None"
            )
        if self.allowed_token_ids == ():
            raise ConfigError("allowed_token_ids is empty: no token can be chosen; name some")


def _ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_ids(name, value)))


def _strings(name: str, value: str | Sequence[object]) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    strings = [string for string in several if isinstance(string, str) and string]
    if len(strings) < len(several):
        raise ConfigError(f"{name} is {shown(value)}, expected strings that are not empty")
    return tuple(dict.fromkeys(strings))


def _biases(name: str, value: Mapping[object, Any]) -> dict[int, float]:
    ids = token_ids(name, value.keys())
    for token, bias in value.items():
        is_number = isinstance(bias, int | float | np.number) and not isinstance(bias, bool)
        if not is_number or not abs(bias) <= _MOST_BIAS:
            raise ConfigError(
                f"{name} of {token} is {bias!r}, expected a number that float32 holds"
            )
    return dict(zip(ids, map(float, value.values()), strict=True))


_CONVERTED: Mapping[str, Callable[[str, Any], object]] = {
    "stop_token_ids": _ids,
    "allowed_token_ids": _ids,
    "logprob_token_ids": _ids,
    "stop": _strings,
    "bad_words": _strings,
    "logit_bias": _biases,
}

# Where neither a caller nor the model says how: greedy, so that an answer can be repeated.
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def sampling_of(given: object) -> SamplingParams:
    """Return what a caller gave, or `GREEDY` for None.

    Raises:
        ConfigError: it is neither.
    """
    if given is None:
        return GREEDY
    if not isinstance(given, SamplingParams):
        raise ConfigError(
            f"sampling is {shown(given)}, expected a SamplingParams, such as "
            "SamplingParams(temperature=0.0, max_tokens=64)"
        )
    return given
