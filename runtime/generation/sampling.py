"""Token sampling: greedy, or temperature, then top-k, then top-p."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.token_ids import token_ids

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]
Draws = npt.NDArray[np.float64]

_WHOLE = ("max_new_tokens", "top_k", "seed")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a generation."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    seed: int = 0
    stop_token_ids: Collection[int] | None = None  # None: those of the engine's manifest

    def __post_init__(self) -> None:
        """Refuse values without a meaning, and keep the stop tokens as a tuple.

        Raises:
            ConfigError: a value is of another type, or out of its range.
        """
        if self.stop_token_ids is not None:
            stops = token_ids("stop_token_ids", self.stop_token_ids)
            object.__setattr__(self, "stop_token_ids", stops)
        self._check("max_new_tokens", 1, np.inf, "1 or more")
        self._check("temperature", 0, np.finfo(float).max, "0 (greedy) or more, and finite")
        self._check("top_k", 0, np.inf, "0 (all) or more")
        self._check("top_p", np.nextafter(0, 1), 1, "above 0 and at most 1")
        self._check("seed", 0, np.inf, "0 or more")

    def _check(self, name: str, least: float, most: float, choices: str) -> None:
        value = getattr(self, name)
        numbers = (int, np.integer) if name in _WHOLE else (int, float, np.number)
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            kind = "a whole number, " if name in _WHOLE else "a number, "
            raise ConfigError(f"{name} is {value!r}, expected {kind}{choices}")


def generator(seed: int, prompt: Sequence[int]) -> np.random.Generator:
    """Return where a sequence's draws come from: nothing of the rest of its batch decides them."""
    return np.random.default_rng([seed, *prompt])


def choose(logits: Logits, sampling: SamplingParams, draws: Draws) -> Tokens:
    """Return one token per row, which depends on that row and its draw alone.

    Args:
        logits: [batch, vocab].
        sampling: how to choose.
        draws: [batch], from 0 up to 1 and not 1; unused when greedy.

    Returns:
        Token ids [batch].
    """
    if sampling.temperature == 0:
        return np.asarray(logits.argmax(axis=-1), np.int64)
    with np.errstate(over="ignore"):  # so far below the best that its probability is 0
        below = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        scores = below / sampling.temperature
    if sampling.top_k:
        scores = _keep_top_k(scores, sampling.top_k)
    probabilities = _softmax(scores)
    if sampling.top_p < 1:
        probabilities = _keep_top_p(probabilities, sampling.top_p)
    mass = probabilities.cumsum(axis=-1)
    mass /= mass[:, -1:]  # to 1, whatever the rounding
    # The first token up to which there is more probability than the draw.
    return np.asarray((mass <= draws[:, None]).sum(axis=-1), np.int64)


def _keep_top_k(scores: Probabilities, k: int) -> Probabilities:
    smallest = np.sort(scores, axis=-1)[:, -min(k, scores.shape[-1])][:, None]
    return np.where(scores < smallest, -np.inf, scores)


def _softmax(scores: Probabilities) -> Probabilities:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def _keep_top_p(probabilities: Probabilities, p: float) -> Probabilities:
    """Keep the fewest tokens whose probabilities reach p (nucleus sampling, arXiv 1904.09751)."""
    order = np.argsort(-probabilities, axis=-1)
    descending = np.take_along_axis(probabilities, order, axis=-1)
    before = descending.cumsum(axis=-1) - descending  # mass ahead of each token
    kept = np.zeros_like(probabilities)
    np.put_along_axis(kept, order, np.where(before < p, descending, 0), axis=-1)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))
