"""Parameters of one answer: how its tokens are chosen, and where it ends.

Names and defaults are those of vLLM's `SamplingParams`, but for three: `max_new_tokens` is 64, the
default temperature is 0 (greedy), and `seed` is a number, so that every answer can be repeated.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.generation.text.token_ids import token_ids

_WHOLE = ("max_new_tokens", "top_k", "seed", "n", "logprobs")
_MOST_BIAS = float(np.finfo(np.float32).max)
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "max_new_tokens": (1, np.inf, "1 or more"),
    "temperature": (0, np.finfo(float).max, "0 (greedy) or more, and finite"),
    "top_k": (0, np.inf, "0 (all) or more"),
    "top_p": (np.nextafter(0, 1), 1, "above 0 and at most 1"),
    "seed": (0, np.inf, "0 or more"),
    "n": (1, np.inf, "1 or more"),
    "min_p": (0, 1, "from 0 (all) to 1"),
    "repetition_penalty": (np.nextafter(0, 1), np.finfo(float).max, "above 0, and finite"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
}


@short_repr
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a generation."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    seed: int = 0
    stop_token_ids: Collection[int] | None = None  # None: those of the engine's manifest
    n: int = 1  # answers to one prompt, with draws of their own
    stop: str | Sequence[str] | None = None  # strings that end the text, which ends before them
    min_p: float = 0.0  # least probability in parts of the greatest; 0 keeps all
    repetition_penalty: float = 1.0  # of tokens in prompt or answer; above 1 makes them rarer
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # the same, times how often a token is in the answer
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    logprobs: int | None = None  # tokens a step with log probabilities; the chosen one comes too
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Refuse values without a meaning, and keep collections as tuples.

        Raises:
            ConfigError: a value is of another type, out of its range, or contradicts another.
        """
        for name, (least, most, choices) in _RANGES.items():
            self._check(name, least, most, choices)
        if self.logprobs is not None:
            self._check("logprobs", -1, np.inf, "-1 (all tokens) or more")
        if self.stop_token_ids is not None:
            self._keep("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if self.stop is not None:
            self._keep("stop", _strings(self.stop))
        if self.logit_bias is not None:
            self._keep("logit_bias", _biases(self.logit_bias))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ConfigError(
                f"structured_outputs is {shown(self.structured_outputs)}, expected a "
                "StructuredOutputsParams, such as StructuredOutputsParams(regex='yes|no')"
            )
        self._check_contradictions()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return tuple(self.stop or ())

    @property
    def needs_text(self) -> bool:
        """Whether tokens are looked at as text, for which a tokenizer is needed."""
        return bool(self.stop) or self.structured_outputs is not None

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the engine's."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return (
            penalties != (1, 0, 0) or bool(self.logit_bias) or self.structured_outputs is not None
        )

    def _check_contradictions(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"n is {self.n}, but temperature 0 (greedy) gives equal answers; pass a "
                "temperature above 0, or n=1"
            )
        if self.stop and self.structured_outputs is not None:
            raise ConfigError(
                f"stop is {shown(self.stop)}, which would cut what structured_outputs asks for; "
                "pass one of them"
            )

    def _check(self, name: str, least: float, most: float, choices: str) -> None:
        value = getattr(self, name)
        numbers = (int, np.integer) if name in _WHOLE else (int, float, np.number)
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            kind = "a whole number, " if name in _WHOLE else "a number, "
            raise ConfigError(f"{name} is {value!r}, expected {kind}{choices}")

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"stop is {shown(value)}, expected strings that are not empty")
    return tuple(strings)


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"logit_bias is {shown(value)}, expected numbers by token id: {{5: -1.5}}"
        )
    ids = token_ids("logit_bias", value.keys())
    for token, bias in value.items():
        is_number = isinstance(bias, int | float | np.number) and not isinstance(bias, bool)
        if not is_number or not abs(bias) <= _MOST_BIAS:
            raise ConfigError(
                f"logit_bias of {token} is {bias!r}, expected a number that float32 holds"
            )
    return dict(zip(ids, map(float, value.values()), strict=True))
