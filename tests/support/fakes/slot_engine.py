"""An engine with slots and a static cache whose next token tells prompt, answer and adapter apart.

Its adapters are numbers. The cache holds the tokens themselves, so that a row which is moved
without it, or meets another row's adapter, gives another answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.contract.slots import LORA_SLOT
from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import choose, generator, next_keys
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy

VOCABULARY, POISON = 97, 90
_BROAD = 40  # what the logits of two tokens next to each other differ by, in parts of one


def slot_manifest(slots: int, rows: int = 4) -> Manifest:
    """Return the manifest of the engine."""
    base = make_manifest()
    logits = replace(base.outputs[0], shape=("kept", VOCABULARY))
    return replace(
        base,
        max_loras=slots,
        max_batch_size=rows,
        outputs=(logits, *base.outputs[1:]),
    )


def number_file(folder: Path, number: int) -> Path:
    """Write the adapter of a number above 0; that of `POISON` answers with NaN."""
    path = folder / f"{number}.safetensors"
    weights = make_weights(slot_manifest(1))
    save_file({name: np.full_like(w, number) for name, w in weights.items()}, path)
    return path


def expected_answer(
    prompt: Sequence[int], number: int, sampling: SamplingParams, max_len: int = 32
) -> list[int | None]:
    """Return the tokens that a prompt is given alone; None is a stop token."""
    ids, found = list(prompt), list[int | None]()
    draws = generator(sampling.seed, prompt)
    while len(found) < min(sampling.max_tokens or max_len, max_len - len(prompt)):
        logits = _logits(sum(ids), len(ids), number)[None]
        token = int(choose(HostTopK(logits), [sampling], next_keys(draws))[0])
        if token in (sampling.stop_token_ids or ()):
            return [*found, None]
        ids.append(token)
        found.append(token)
    return found


class SlotEngine(FakeExecutor):
    """Runs on the host."""

    def __init__(self, slots: int, rows: int = 4) -> None:
        super().__init__(slot_manifest(slots, rows))
        self.steps = 0

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        self.steps += 1
        names = ("input_ids", "lengths", "kept", "cache.0.key", LORA_SLOT)
        ids, lengths, kept, cache, slots = (tensor_map[name].numpy() for name in names)
        stack = tensor_map[next(iter(self.manifest.lora_bindings))].numpy()
        logits = np.zeros((*ids.shape, VOCABULARY), np.float32)
        for row, length in enumerate(lengths):
            number = int(stack[slots[row], 0, 0]) if slots[row] >= 0 else 0
            for place, token in enumerate(ids[row]):
                at = int(length) + place
                cache[row, 0, at, 0] = token
                total = int(cache[row, 0, : at + 1, 0].sum())
                logits[row, place] = _logits(total, at + 1, number)
        return {"logits": tensor_from_numpy(logits.reshape(-1, VOCABULARY)[kept])}


def _logits(total: int, count: int, number: int) -> Logits:
    """Logits [vocab] behind tokens of that sum and number; the first of them leads."""
    if number == POISON:
        return np.full(VOCABULARY, np.nan, np.float32)
    first = (3 * total + 7 * count + 11 * number) % VOCABULARY
    return (-((np.arange(VOCABULARY) - first) % VOCABULARY) / _BROAD).astype(np.float32)


class FailsOnce(SlotEngine):
    """A device that fails at the end of one of its runs, when it has written to the cache."""

    def __init__(self, at: int, slots: int, rows: int = 4) -> None:
        super().__init__(slots, rows)
        self.at = at

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run, or fail."""
        found = super().execute(tensor_map)
        if self.steps == self.at:
            raise BackendError("the device was lost for a moment")
        return found
