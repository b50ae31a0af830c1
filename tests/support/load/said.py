"""Said: an answer's tokens with their log probabilities, which tell adapters apart that agree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_lora.runtime import Engine, SamplingParams

_TOLERANCE = 1e-3  # of a log probability: other rows change its rounding
TOKENS = 5
ASKED = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "logprobs": 1}
_SAMPLING = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0, logprobs=1)


@dataclass(frozen=True)
class Said:
    """One answer."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def is_one_of(self, others: "Iterable[Said]") -> bool:
        """Whether it is that of others, but for rounding."""
        return any(self._is(other) for other in others)

    def _is(self, other: "Said") -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return self.ids == other.ids and all(abs(a - b) < _TOLERANCE for a, b in pairs)


def said_over_http(body: Any) -> Said:
    """Return what a completion says that was asked for with `ASKED` and `return_token_ids`."""
    (choice,) = body["choices"]
    return Said(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


def said_alone(engine: Engine, prompt: Sequence[int], parts: Mapping[str, float]) -> Said:
    """Return what an engine says that answers nothing else, with one adapter or a blend."""
    name = "+".join(f"{name}*{weight}" for name, weight in parts.items())
    if [*parts.values()] == [1.0]:
        (name,) = parts
    elif name not in engine.adapters.names:
        engine.adapters.blend(name, parts)
    answer = engine.generate(prompt, adapter=name, sampling=_SAMPLING)
    assert answer.logprobs is not None
    known = zip(answer.token_ids, answer.logprobs, strict=True)
    return Said(answer.token_ids, tuple(logprobs[token].logprob for token, logprobs in known))
