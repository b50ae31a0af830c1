"""Prefill and decode with the KV cache: token ids in, one token per sequence and step out."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.dtypes import storage_dtype
from trt_lora.runtime.executor import Executor
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.sampling import Logits
from trt_lora.runtime.tensors import Tensor, TensorMap, tensor_from_storage

Ids = npt.NDArray[np.int64]

PAST, PRESENT = "past_key_values.", "present."


class Decoder:
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
        positions = np.maximum(whole.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        self._put("input_ids", ids)
        self._put("attention_mask", whole)
        self._put("position_ids", positions)
        self._put("logits_to_keep", np.arange(ids.shape[1] - keep, ids.shape[1]))
        outputs = self._executor.execute(self._map)
        self._mask = whole
        logits = outputs.pop("logits")
        self._map.update({PAST + name.removeprefix(PRESENT): t for name, t in outputs.items()})
        return logits.numpy().astype(np.float32, copy=False)

    def _put(self, name: str, array: npt.NDArray[np.int64]) -> None:
        self._map[name] = tensor_from_storage(np.ascontiguousarray(array, np.int64), "int64")


def empty_cache(manifest: Manifest, batch_size: int) -> dict[str, Tensor]:
    """Return the cache inputs before the first token, [batch, heads, 0, head_dim]."""
    cache = {}
    for binding in manifest.inputs:
        if binding.name.startswith(PAST):
            _, heads, _, head_dim = binding.shape
            shape = (batch_size, int(heads), 0, int(head_dim))
            storage = np.empty(shape, storage_dtype(binding.dtype))
            cache[binding.name] = tensor_from_storage(storage, binding.dtype)
    return cache


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
