"""Logits of an engine for given tokens: prompts by prefill, the rest token by token."""

from collections.abc import Sequence

import numpy as np

from trt_lora.runtime import Engine, TensorMap
from trt_lora.runtime.generation.decoding.growing_decoder import GrowingDecoder
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids, left_pad
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.manifest import STATIC

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
            prompts: in a static cache each is run by itself, in a growing one left-padded.
    """
    run = _static if engine.manifest.kv_cache == STATIC else _growing
    return run(engine, tensor_map, rows, decoded)


def _static(
    engine: Engine, tensor_map: TensorMap, rows: Sequence[Row], decoded: int
) -> list[Logits]:
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


def _growing(
    engine: Engine, tensor_map: TensorMap, rows: Sequence[Row], decoded: int
) -> list[Logits]:
    decoder = GrowingDecoder(engine, tensor_map, len(rows))
    ids, mask = left_pad([row[: len(row) - decoded] for row in rows], 0)
    steps = [decoder.step(ids, mask, keep=ids.shape[1])]
    steps += [decoder.step(column, np.ones_like(column)) for column in _columns(rows, decoded)]
    padded = np.concatenate(steps, axis=1)
    return [logits[-len(row) :] for logits, row in zip(padded, rows, strict=True)]


def _columns(rows: Sequence[Row], decoded: int) -> list[Ids]:
    """The decoded tokens [rows, 1], one array a step."""
    return [np.array([[row[-i]] for row in rows], np.int64) for i in range(decoded, 0, -1)]
