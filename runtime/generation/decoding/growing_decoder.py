"""Prefill and decode with a KV cache that grows: all sequences begin together."""

import numpy as np

from trt_lora.plugins.contract.step import LOGITS
from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.step_inputs import (
    Ids,
    empty_cache,
    next_cache,
    token_inputs,
)
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.tensor import TensorMap, tensor_from_numpy


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
