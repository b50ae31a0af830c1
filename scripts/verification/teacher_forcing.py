"""Logits of an engine for given tokens: prompts by prefill, the rest token by token."""

from collections.abc import Sequence

import numpy as np

from trt_lora.runtime import Engine, TensorMap
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids

Row = Sequence[int]


def forced_logits(
    engine: Engine, tensor_map: TensorMap, rows: Sequence[Row], decoded: int
) -> list[Logits]:
    """Return logits [tokens, vocab] of every token of every row.

    Args:
        engine: it runs.
        tensor_map: holds its LoRA bindings.
        rows: token ids; their lengths may differ.
        decoded: tokens at the end of each row that are decoded, all rows together. The others are
            prompts, each of which is run by itself.
    """
    decoder = StaticDecoder(engine, tensor_map, len(rows))
    found = []
    for place, row in enumerate(rows):
        decoder.cache.admit(place)
        prompt = np.array([row[: len(row) - decoded]], np.int64)
        found.append([decoder.run(prompt, first=place, kept=np.arange(prompt.size))])
    for column in _columns(rows, decoded):
        for place, logits in enumerate(decoder.decode(column[:, 0])):
            found[place].append(logits[None].copy())
    return [np.concatenate(parts) for parts in found]


def _columns(rows: Sequence[Row], decoded: int) -> list[Ids]:
    """The decoded tokens [rows, 1], one array a step."""
    return [np.array([[row[-i]] for row in rows], np.int64) for i in range(decoded, 0, -1)]
