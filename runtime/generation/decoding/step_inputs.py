"""Names, shapes and arrays of one engine step: token inputs, logits and KV cache.

Inputs   input_ids, position_ids [batch, sequence], attention_mask [batch, total_sequence],
         logits_to_keep [kept] (which positions get logits: decoding needs the last one only),
         past_key_values.<layer>.{key,value} [batch, kv_heads, past_sequence, dim]
Outputs  logits [batch, kept, vocab], present.<layer>.{key,value} [.., total_sequence, dim]
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_storage

Ids = npt.NDArray[np.int64]
CacheShape = tuple[int, int, int, int]  # batch, kv_heads, length, dim

INPUT_IDS, POSITION_IDS = "input_ids", "position_ids"
ATTENTION_MASK, LOGITS_TO_KEEP = "attention_mask", "logits_to_keep"
PAST, PRESENT = "past_key_values.", "present."

# Symbolic dimensions.
BATCH, SEQUENCE, KEPT = "batch", "sequence", "kept"
PAST_SEQUENCE, TOTAL_SEQUENCE = "past_sequence", "total_sequence"

TOKEN_SHAPES: Mapping[str, tuple[str, ...]] = {
    INPUT_IDS: (BATCH, SEQUENCE),
    POSITION_IDS: (BATCH, SEQUENCE),
    ATTENTION_MASK: (BATCH, TOTAL_SEQUENCE),
    LOGITS_TO_KEEP: (KEPT,),
}


def cache_names(prefix: str, layers: int) -> list[str]:
    """Return the names of the cache inputs (`PAST`) or outputs (`PRESENT`) of so many layers."""
    return [f"{prefix}{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


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
        INPUT_IDS: np.ascontiguousarray(ids, np.int64),
        POSITION_IDS: np.ascontiguousarray(positions, np.int64),
        ATTENTION_MASK: np.ascontiguousarray(mask, np.int64),
        LOGITS_TO_KEEP: np.arange(length - keep, length, dtype=np.int64),
    }


def cache_shapes(
    manifest: Manifest, prefix: str, batch_size: int, length: int
) -> dict[str, CacheShape]:
    """Return the shape [batch, kv_heads, length, dim] of every input that `prefix` begins."""
    shapes = {}
    for binding in manifest.inputs:
        if binding.name.startswith(prefix):
            _, heads, _, dim = binding.shape
            shapes[binding.name] = (batch_size, int(heads), length, int(dim))
    return shapes


def empty_cache(manifest: Manifest, batch_size: int) -> dict[str, Tensor]:
    """Return the cache inputs before the first token, [batch, kv_heads, 0, dim]."""
    dtypes = {binding.name: binding.dtype for binding in manifest.inputs}
    return {
        name: tensor_from_storage(np.empty(shape, storage_dtype(dtypes[name])), dtypes[name])
        for name, shape in cache_shapes(manifest, PAST, batch_size, 0).items()
    }


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
