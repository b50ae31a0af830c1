"""Steps of the tiny engine whose cache grows: shapes that change at every run of an executor."""

from collections.abc import Mapping, Sequence

import numpy as np

from trt_lora.plugins.contract.step import LOGITS
from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy, tensor_from_storage

PAST, PRESENT = "past_key_values.", "present."
TOKENS = ("input_ids", "position_ids", "attention_mask", "logits_to_keep")


def token_inputs(ids: Ids, mask: Ids, keep: int = 1) -> dict[str, Ids]:
    """Return every input of a step but the cache and the adapter, each in one piece.

    Args:
        ids: new tokens [batch, s].
        mask: of all positions so far, the new ones among them [batch, total]; 0 is padding.
        keep: positions at the end of `ids` that get logits.
    """
    length = ids.shape[1]
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -length:]
    return {
        TOKENS[0]: np.ascontiguousarray(ids, np.int64),
        TOKENS[1]: np.ascontiguousarray(positions, np.int64),
        TOKENS[2]: np.ascontiguousarray(mask, np.int64),
        TOKENS[3]: np.arange(length - keep, length, dtype=np.int64),
    }


def empty_cache(manifest: Manifest, batch_size: int) -> dict[str, Tensor]:
    """Return the cache inputs before the first token, [batch, kv_heads, 0, dim]."""
    found = {}
    for binding in manifest.inputs:
        if binding.name.startswith(PAST):
            _, heads, _, dim = binding.shape
            array = np.empty((batch_size, int(heads), 0, int(dim)), storage_dtype(binding.dtype))
            found[binding.name] = tensor_from_storage(array, binding.dtype)
    return found


def next_cache(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the cache outputs of a step under the names of the next step's inputs."""
    return {
        PAST + name.removeprefix(PRESENT): tensor
        for name, tensor in outputs.items()
        if name.startswith(PRESENT)
    }


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Ids, Ids]:
    """Return ids [batch, s] and mask [batch, s]; padding comes first, so all prompts end together.

    Raises:
        TensorError: there is no prompt, or one is empty.
    """
    if not prompts or not all(prompts):
        raise TensorError("every prompt needs at least one token, and a batch one prompt")
    width = max(len(prompt) for prompt in prompts)
    ids = np.full((len(prompts), width), pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask


class GrowingDecoder:
    """One batch of sequences on an engine: its tokens so far, their mask and their cache."""

    def __init__(self, executor: Executor, tensor_map: TensorMap, batch_size: int) -> None:
        """Start with an empty cache.

        Args:
            executor: a running engine.
            tensor_map: holds the engine's LoRA bindings; tokens and cache are added to a copy of
                the map, not of the tensors.
            batch_size: number of sequences.
        """
        self._executor = executor
        self._map = TensorMap(tensor_map)
        self._mask = np.zeros((batch_size, 0), np.int64)
        self._map.update(empty_cache(executor.manifest, batch_size))

    @property
    def length(self) -> int:
        """Positions taken so far, padding included."""
        return self._mask.shape[1]

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings from the next step on; what is in the cache stays."""
        self._map.update(tensor_map)

    def step(self, ids: Ids, mask: Ids, *, keep: int = 1) -> Logits:
        """Append tokens [batch, s] with mask [batch, s] (0 is padding); run the engine once.

        Returns:
            Logits [batch, keep, vocab] of the last `keep` positions, as float32.

        Raises:
            TensorError: the sequences would be longer than the engine allows.
        """
        limit = self._executor.manifest.max_seq_len
        if self.length + ids.shape[1] > limit:
            raise TensorError(
                f"{self.length + ids.shape[1]} tokens are more than this engine's {limit}; "
                "shorten the prompt, or build with a larger --max-seq-len"
            )
        if not 1 <= keep <= ids.shape[1]:
            raise TensorError(f"cannot keep {keep} of {ids.shape[1]} positions")
        whole = np.concatenate([self._mask, mask], axis=1)
        tokens = token_inputs(ids, whole, keep)
        self._map.update({name: tensor_from_numpy(array) for name, array in tokens.items()})
        outputs = self._executor.execute(self._map)
        self._mask = whole
        logits = outputs[LOGITS]
        self._map.update(next_cache(outputs))
        return logits.numpy().astype(np.float32, copy=False)
