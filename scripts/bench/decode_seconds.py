"""Seconds of decode steps behind one prompt, by an engine and by transformers."""

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from trt_lora.runtime import Engine, LoRAManager, TensorMap
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.scripts.measuring.seconds import seconds_of
from trt_lora.scripts.terminal.adapters import activate

PROMPT_LENGTH, DECODE_STEPS = 64, 32


def engine_decode_seconds(engine: Engine, manager: LoRAManager, name: str) -> float:
    """Decode with an adapter, or with the base model ("") and its dummies."""
    activate(manager, name)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    decoder = StaticDecoder(engine, tensor_map, 1)
    logits = decoder.run(_prompt())

    def run() -> None:
        nonlocal logits
        for _ in range(DECODE_STEPS):
            logits = decoder.decode(logits.argmax(-1))

    return seconds_of(run).wall


@torch.inference_mode()
def peft_decode_seconds(model: Any) -> float:
    """Decode with what is active in a model of transformers."""
    cache = DynamicCache()
    out = model(input_ids=torch.from_numpy(_prompt()), past_key_values=cache, use_cache=True)

    def run() -> None:
        nonlocal out
        for _ in range(DECODE_STEPS):
            token = out.logits[:, -1].argmax(-1)[:, None]
            out = model(input_ids=token, past_key_values=cache, use_cache=True)

    return seconds_of(run).wall


def _prompt() -> Any:
    return np.random.default_rng(0).integers(100, 40000, (1, PROMPT_LENGTH))
