"""Names, shapes and arrays of a step whose KV cache is written in place.

Inputs   input_ids [batch, sequence], lengths [batch] (tokens already in each row, which is where
         new ones are written), kept [kept] (places in the flattened ids that get logits),
         bound [bound] (its size alone counts: how many positions of the cache are looked at),
         cache.<layer>.{key,value} [batch, kv_heads, max_len, dim]
Outputs  logits [kept, vocab], new_cache.<layer>.{key,value}: the memory of the inputs

A token's position is its place in the row: there is no mask, no position input and no padding on
the left. What a row has behind its length is never looked at, and overwritten by its next tokens.
"""

from collections.abc import Mapping

import numpy as np

from trt_lora.runtime.generation.decoding.step_inputs import BATCH, INPUT_IDS, KEPT, SEQUENCE, Ids
from trt_lora.runtime.memory.dtypes import Array

LENGTHS, KEPT_PLACES, BOUND = "lengths", "kept", "bound"

STATIC_SHAPES: Mapping[str, tuple[str, ...]] = {
    INPUT_IDS: (BATCH, SEQUENCE),
    LENGTHS: (BATCH,),
    KEPT_PLACES: (KEPT,),
    BOUND: (BOUND,),
}


def static_token_inputs(ids: Ids, lengths: Ids, kept: Ids, bound: int) -> dict[str, Array]:
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
