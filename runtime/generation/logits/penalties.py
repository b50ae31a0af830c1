"""Logits of one row with bias and penalties applied.

The order is that of vLLM's sampler (https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler/):
logit bias, then the repetition, frequency and presence penalties. Temperature, min-p, top-k and
top-p follow when a token is chosen. What changes is computed in float64 and rounded once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams

_Floats = npt.NDArray[np.float64]
_LARGEST = np.finfo(np.float32).max  # what bias and penalties bring beyond it counts as this


def apply_penalties(
    logits: npt.NDArray[np.float32],
    sampling: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
) -> npt.NDArray[np.float32]:
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


def _repetition_penalty(values: _Floats, places: npt.NDArray[np.intp], penalty: float) -> None:
    """Divide what is positive and multiply the rest, in place; both may overflow to infinity."""
    found = values[places]
    with np.errstate(over="ignore"):
        values[places] = np.where(found > 0, found / penalty, found * penalty)


def _places(ids: npt.NDArray[np.int64], some: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Where some of the ascending ids are."""
    return np.searchsorted(ids, np.asarray(some, np.int64))
