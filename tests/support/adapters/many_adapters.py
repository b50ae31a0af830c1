"""Adapters on a fake engine with two slots, for the tests of the managers' interfaces."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.fakes.adapter_files import stacks_of
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore

SLOTS = 2
MANIFEST = replace(make_manifest(), max_loras=SLOTS)
A = "lora_A_model.layers.0.self_attn.q_proj"


def slot_adapters(config: StoreConfig | None = None) -> AdapterStore:
    """Return an empty cache of a fake engine."""
    return AdapterStore(FakeExecutor(MANIFEST), config or StoreConfig())


def weights_of(name: str) -> dict[str, Array]:
    """Return weights whose rank and values depend on a name of one letter."""
    return make_weights(MANIFEST, rank=ord(name) % 16 + 1, seed=ord(name))


def adapter_file(folder: Path, name: str) -> Path:
    """Write them."""
    path = folder / f"{name}.safetensors"
    save_file(weights_of(name), path)
    return path


def lies_in(adapters: AdapterStore, name: str, slot: int) -> bool:
    """Return whether a slot holds the weights of a name."""
    stack, given = stacks_of(adapters).views(slot, 1)[A].numpy()[0], weights_of(name)[A]
    return np.array_equal(stack[:, : given.shape[1]], given)
