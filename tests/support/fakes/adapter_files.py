"""Files of adapters of one size, for an engine with two slots."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import save_file
from support.fakes.fake_engine import make_manifest, make_weights

from trt_lora.runtime.store.slot_stacks import SlotStacks
from trt_lora.runtime.store.store import AdapterStore

SLOTS, RANK = 2, 4
MANIFEST = replace(make_manifest(), max_loras=SLOTS)
A = "lora_A_model.layers.0.self_attn.q_proj"
NBYTES = sum(w.nbytes for w in make_weights(MANIFEST, rank=RANK).values())  # of each adapter


def adapter_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Write an adapter for each name, with values of its own; return their paths."""
    paths = {name: folder / f"{name}.safetensors" for name in names}
    for seed, path in enumerate(paths.values()):
        save_file(make_weights(MANIFEST, rank=RANK, seed=seed), path)
    return paths


def stacks_of(store: AdapterStore) -> SlotStacks:
    """Return the stacks of a store, to see what lies in a slot."""
    assert store._levels.slots is not None
    return store._levels.slots.stacks
