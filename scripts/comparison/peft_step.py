"""One step of an engine in transformers: its tokens and cache in, its outputs out."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from trt_lora.plugins.contract.step import CACHE, LOGITS, NEW_CACHE
from trt_lora.runtime.generation.decoding.static_inputs import KEPT_PLACES, LENGTHS
from trt_lora.runtime.generation.decoding.step_inputs import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGITS_TO_KEEP,
    PAST,
    POSITION_IDS,
    PRESENT,
)
from trt_lora.runtime.memory.dtypes import Array

Step = Mapping[str, Array]  # inputs of an engine by name


def step_outputs(model: Any, step: Step) -> dict[str, Array]:
    """Return the outputs of an engine by name, as a model of transformers computes them."""
    return _static(model, step) if LENGTHS in step else _growing(model, step)


def _growing(model: Any, step: Step) -> dict[str, Array]:
    cache = _cache((step[f"{PAST}{layer}.key"], step[f"{PAST}{layer}.value"]) for layer in
                   _layers(step, PAST))  # fmt: skip
    names = (INPUT_IDS, ATTENTION_MASK, POSITION_IDS)  # as transformers has them
    arguments = {name: torch.from_numpy(step[name]) for name in names if name in step}
    out = model(**arguments, past_key_values=cache, use_cache=True)
    outputs = {LOGITS: out.logits[:, torch.from_numpy(step[LOGITS_TO_KEEP])].numpy()}
    for layer, content in enumerate(out.past_key_values.layers):
        outputs[f"{PRESENT}{layer}.key"] = content.keys.numpy()
        outputs[f"{PRESENT}{layer}.value"] = content.values.numpy()
    return outputs


def _static(model: Any, step: Step) -> dict[str, Array]:
    """Every row by itself, from its own length on."""
    ids, layers = step[INPUT_IDS], _layers(step, CACHE)
    names = [f"{layer}.{part}" for layer in layers for part in ("key", "value")]
    written = {f"{NEW_CACHE}{name}": step[f"{CACHE}{name}"].copy() for name in names}
    logits = []
    for row, length in enumerate(step[LENGTHS].tolist()):
        seen = {name: step[f"{CACHE}{name}"][row : row + 1, :, :length] for name in names}
        cache = _cache((seen[f"{layer}.key"], seen[f"{layer}.value"]) for layer in layers)
        tokens = torch.from_numpy(ids[row : row + 1])
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        logits.append(out.logits[0].numpy())
        for layer, content in enumerate(out.past_key_values.layers):
            for part, tensor in (("key", content.keys), ("value", content.values)):
                place = written[f"{NEW_CACHE}{layer}.{part}"][row]
                place[:, length : tensor.shape[2]] = tensor[0, :, length:].numpy()
    return {LOGITS: np.concatenate(logits)[step[KEPT_PLACES]], **written}


def _layers(step: Step, prefix: str) -> range:
    return range(sum(name.startswith(prefix) and name.endswith(".key") for name in step))


def _cache(layers: Iterator[tuple[Array, Array]]) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        cache.update(torch.from_numpy(keys), torch.from_numpy(values), layer)
    return cache
