"""Choose the next token: greedy, or drawn after temperature, top-k and top-p, in that order."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import ConfigError

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when a sequence ends."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None  # None: those of the engine's manifest

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            ConfigError: a value is out of its range.
        """
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more, and finite"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "seed": (self.seed >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
        }
        for name, (allowed, choices) in ranges.items():
            if not allowed:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected {choices}")


def choose(logits: Logits, sampling: Sampling, rng: np.random.Generator) -> Tokens:
    """Return one token per row.

    Args:
        logits: [batch, vocab].
        sampling: how to choose.
        rng: where the draws come from; unused when greedy.

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
    return np.array([rng.choice(row.size, p=row) for row in probabilities], np.int64)


def _keep_top_k(scores: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.float64]:
    smallest = np.sort(scores, axis=-1)[:, -min(k, scores.shape[-1])][:, None]
    return np.where(scores < smallest, -np.inf, scores)


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def _keep_top_p(probabilities: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.float64]:
    """Keep the fewest tokens whose probabilities reach p (nucleus sampling, arXiv 1904.09751)."""
    order = np.argsort(-probabilities, axis=-1)
    descending = np.take_along_axis(probabilities, order, axis=-1)
    before = descending.cumsum(axis=-1) - descending  # mass ahead of each token
    kept = np.zeros_like(probabilities)
    np.put_along_axis(kept, order, np.where(before < p, descending, 0), axis=-1)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))
