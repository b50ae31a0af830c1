"""Logits of one row changed before a token is chosen: forbidden tokens, then bias and penalties.

Forbidden are tokens that are not allowed, bad words, and a stop token too early. As in vLLM, a bad
word is the tokens that it has at the beginning of a text, and those that it has behind a space
where they are other ones; the last of them is forbidden behind the others.

The order of the rest is that of vLLM's sampler
(https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler/): logit bias, then the repetition,
frequency and presence penalties. Temperature, min-p, top-k and top-p follow when a token is chosen.
What changes is computed in float64 and rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.topk import Floats, Logits
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer

_LARGEST = np.finfo(np.float32).max  # what bias and penalties bring beyond it counts as this


@dataclass(frozen=True)
class ForbiddenTokens:
    """What `SamplingParams` forbids an answer, in tokens."""

    allowed: tuple[int, ...] | None  # None: all
    bad_words: tuple[tuple[int, ...], ...]
    early: tuple[int, ...]  # not before `min_tokens`: stop tokens
    min_tokens: int

    def apply(self, logits: Logits, answer: Sequence[int]) -> Logits:
        """Return logits [vocab] that are -inf where a token is forbidden; others are copied.

        Args:
            logits: [vocab]; they stay as they are.
            answer: token ids so far.
        """
        if self.allowed is None:
            result = logits.copy()
        else:
            result = np.full_like(logits, -np.inf)
            result[[*self.allowed]] = logits[[*self.allowed]]
        result[self._word_ends(answer)] = -np.inf
        if len(answer) < self.min_tokens:
            result[[*self.early]] = -np.inf
        return result

    def changes(self, length: int) -> bool:
        """Whether anything is forbidden behind an answer of so many tokens."""
        return self.allowed is not None or bool(self.bad_words) or length < self.min_tokens

    def _word_ends(self, answer: Sequence[int]) -> list[int]:
        """The last tokens of the bad words that the answer has begun."""
        return [
            word[-1]
            for word in self.bad_words
            if tuple(answer[len(answer) - len(word) + 1 :]) == word[:-1]
        ]


def forbidden_tokens(
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    vocabulary: int,
    tokenizer: TextTokenizer | None,
) -> ForbiddenTokens:
    """Return what an answer's parameters forbid it.

    Args:
        sampling: the parameters.
        stop_token_ids: of the answer and the model, whether or not the answer ignores the latter.
        vocabulary: number of tokens of the model.
        tokenizer: that bad words need.

    Raises:
        ConfigError: an allowed token is none of the model's, or a bad word is not made of them.
    """
    allowed = sampling.allowed_token_ids
    words = [] if tokenizer is None else sampling.bad_words or ()
    found = [_word_ids(word, tokenizer) for word in words if tokenizer is not None]
    return ForbiddenTokens(
        None if allowed is None else token_ids("allowed_token_ids", allowed, vocabulary),
        tuple(token_ids("bad_words", ids, vocabulary) for several in found for ids in several),
        tuple(stop_token_ids),
        sampling.min_tokens,
    )


def apply_penalties(
    logits: Logits, sampling: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> Logits:
    """Return the logits that the next token is chosen from.

    Args:
        logits: [vocab]; they stay as they are. -inf is a token that is forbidden, and stays so.
        sampling: bias and penalties.
        prompt: token ids.
        answer: token ids so far. They alone count for the presence and frequency penalties.

    Returns:
        Logits [vocab].
    """
    bias = sampling.logit_bias or {}
    repeated, counts = np.unique(np.array(answer, np.int64), return_counts=True)
    seen = np.union1d(repeated, np.array(prompt, np.int64))
    changed = np.union1d(seen, np.array([*bias], np.int64))
    values = logits[changed].astype(np.float64)
    values[_places(changed, [*bias])] += [*bias.values()]
    _repetition_penalty(values, _places(changed, seen), sampling.repetition_penalty)
    answered = _places(changed, repeated)
    values[answered] -= sampling.frequency_penalty * counts
    values[answered] -= sampling.presence_penalty
    result = logits.copy()
    is_forbidden = np.isneginf(logits[changed])
    result[changed] = np.where(is_forbidden, -np.inf, np.clip(values, -_LARGEST, _LARGEST))
    return result


def _word_ids(word: str, tokenizer: TextTokenizer) -> list[list[int]]:
    """The tokens of a word at the beginning of a text, and behind a space."""
    first = tokenizer.encode_text(word.lstrip(), special_tokens=False)
    behind = tokenizer.encode_text(f" {word.lstrip()}", special_tokens=False)
    if not first:
        raise ConfigError(f"bad_words has {word!r}, of which the tokenizer makes no token")
    is_other = len(behind) == len(first) and behind[0] != first[0]
    return [first, behind] if is_other else [first]


def _repetition_penalty(values: Floats, places: npt.NDArray[np.intp], penalty: float) -> None:
    """Divide what is positive and multiply the rest, in place; both may overflow to infinity."""
    found = values[places]
    with np.errstate(over="ignore"):
        values[places] = np.where(found > 0, found / penalty, found * penalty)


def _places(ids: npt.NDArray[np.int64], some: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Where some of the ascending ids are."""
    return np.searchsorted(ids, np.asarray(some, np.int64))
