"""Names, shapes and arrays of a step.

Inputs   input_ids [batch, sequence], lengths [batch] (tokens already in each row, which is where
         new ones are written), kept [kept] (places in the flattened ids that get logits),
         bound [bound] (its size alone counts: how many positions of the cache are looked at),
         cache.<layer>.{key,value} [batch, kv_heads, max_len, dim]; of an encoder-decoder also
         source_lengths [batch] and cross.<layer>.{key,value} [batch, heads, max_source_len, dim]
Outputs  logits [kept, vocab], new_cache.<layer>.{key,value}: the memory of the inputs

A token's position is its place in the row: there is no mask, no position input and no padding on
the left. What a row has behind its length is never looked at, and overwritten by its next tokens.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array

Ids = npt.NDArray[np.int64]

INPUT_IDS, LENGTHS, KEPT_PLACES, BOUND = "input_ids", "lengths", "kept", "bound"

# Symbolic dimensions.
BATCH, SEQUENCE, KEPT, SOURCE_SIZE = "batch", "sequence", "kept", "source_size"

TOKEN_SHAPES: Mapping[str, tuple[str, ...]] = {
    INPUT_IDS: (BATCH, SEQUENCE),
    LENGTHS: (BATCH,),
    KEPT_PLACES: (KEPT,),
    BOUND: (BOUND,),
}


def cache_names(prefix: str, layers: int) -> list[str]:
    """Return the names of the cache inputs or outputs of so many layers, in their order."""
    return [f"{prefix}{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def token_inputs(ids: Ids, lengths: Ids, kept: Ids, bound: int) -> dict[str, Array]:
    """Return every input of a step but the cache and the adapter, each in one piece.

    Args:
        ids: new tokens [batch, s].
        lengths: tokens in each row before them [batch].
        kept: places in the flattened ids that get logits [kept].
        bound: positions looked at; at least the longest length + s.
    """
    return {
        INPUT_IDS: np.ascontiguousarray(ids, np.int64),
        LENGTHS: np.ascontiguousarray(lengths, np.int64),
        KEPT_PLACES: np.ascontiguousarray(kept, np.int64),
        BOUND: np.zeros(bound, np.bool_),
    }
