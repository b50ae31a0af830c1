"""The tiny engine with a static KV cache: it writes in place, and looks at what a row holds.

    x = embedding[input_ids] + 0.1 * position              written to both caches at `lengths`
    h = the sum of a quarter of the keys and three quarters of the values, up to each position
    logits = down(up(h)), both with LoRA, at the places kept

As attention does, it multiplies what is masked by 0: what is no number there shows.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from support.fakes.tiny_engine import (
    BASE,
    DOWN,
    EMBEDDING,
    MAX_RANK,
    UP,
    VOCABULARY,
    WIDTH,
    small_manifest,
)

from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT
from trt_lora.runtime.manifest import Binding, Manifest, Range
from trt_lora.runtime.memory.dtypes import Array

ROWS, PROMPT = 4, 8  # its limits
KEY, VALUE = "cache.0.key", "cache.0.value"


def static_manifest(max_len: int = 16, rows: int = ROWS) -> Manifest:
    """Return the manifest of the tiny model with a cache of `max_len` places a row."""
    growing = small_manifest()
    caches = [Binding(name, "float32", ("batch", 1, max_len, WIDTH)) for name in (KEY, VALUE)]
    inputs = (
        Binding("input_ids", "int64", ("batch", "sequence")),
        Binding("lengths", "int64", ("batch",)),
        Binding("kept", "int64", ("kept",)),
        Binding("bound", "bool", ("bound",)),
        *caches,
        *(binding for binding in growing.inputs if binding.name in growing.lora_bindings),
    )
    batch, rank = (1, 1, rows), (1, 2, MAX_RANK)
    decode = {"sequence": (1, 1, 1), "kept": batch, "bound": (max_len,) * 3}
    prefill = {
        "sequence": (1, PROMPT, PROMPT),
        "kept": (1, 1, PROMPT),
        "bound": (1, PROMPT, max_len),
    }
    known = {"batch": batch, "rank": rank}
    return replace(
        growing,
        inputs=inputs,
        outputs=(
            Binding("logits", "float32", ("kept", VOCABULARY)),
            *(replace(b, name=f"new_{b.name}", in_place_of=b.name) for b in caches),
        ),
        profiles={
            name: {binding.name: _range(binding, symbols | known) for binding in inputs}
            for name, symbols in (("decode", decode), ("prefill", prefill))
        },
        max_batch_size=rows,
        max_input_len=PROMPT,
        max_seq_len=max_len,
    )


def tiny_static_model(views: Mapping[str, Array]) -> dict[str, Array]:
    """Write the caches and compute the logits, in float32, as the engine does.

    Raises:
        IndexError: a row has no room; TensorRT would write into the next one.
    """
    ids, lengths = views["input_ids"], views["lengths"]
    positions = lengths[:, None] + np.arange(ids.shape[1])
    x = EMBEDDING.astype(np.float32)[ids] + np.float32(0.1) * positions[..., None].astype(
        np.float32
    )
    rows = np.arange(len(ids))[:, None]
    for name in (KEY, VALUE):
        views[f"new_{name}"][rows, 0, positions] = x
    bound = views["bound"].size
    seen = (np.arange(bound) <= positions[..., None]).astype(np.float32)
    held = np.float32(0.25) * views[f"new_{KEY}"] + np.float32(0.75) * views[f"new_{VALUE}"]
    h = seen @ held[:, 0, :bound]
    for site in (UP, DOWN):
        a, b = views[f"lora_A_{site.path}"], views[f"lora_B_{site.path}"]
        delta = _delta_of_rows(views[LORA_SLOT], h, a, b) if LORA_SLOT in views else (h @ a) @ b
        h = h @ BASE[site.path].astype(np.float32) + delta
    return {"logits": h.reshape(-1, VOCABULARY)[views["kept"]]}


def static_slots_manifest(slots: int) -> Manifest:
    """Return the manifest of the tiny static model where every row has an adapter of its own."""
    single = static_manifest()
    loras = single.lora_bindings
    stacks = {n: (slots, *site.shape(f, MAX_RANK)) for n, (site, f) in loras.items()}
    rows = {LORA_SLOT: ("slot_rows",), LORA_RANK: ("slots", len(single.sites))}
    inputs = (
        *(binding for binding in single.inputs if binding.name not in loras),
        *(Binding(n, "float32", ("slots", *shape[1:])) for n, shape in stacks.items()),
        *(Binding(name, "int32", shape) for name, shape in rows.items()),
    )
    sizes = {"slot_rows": (1, 1, ROWS), "slots": (1, slots, slots)}
    ranges = {b.name: _range(b, sizes) for b in inputs if b.name in stacks.keys() | rows.keys()}
    profiles = {name: {**found, **ranges} for name, found in single.profiles.items()}
    return replace(single, inputs=inputs, profiles=profiles, max_loras=slots)


def _delta_of_rows(slot: Array, h: Array, a: Array, b: Array) -> Array:
    """Each row's, of its slot; zero where that is none. One slot may stand for all rows."""
    slots = np.broadcast_to(slot, len(h))
    zero = np.zeros((*h.shape[1:-1], b.shape[-1]), np.float32)
    return np.stack([(x @ a[s]) @ b[s] if s >= 0 else zero for x, s in zip(h, slots, strict=True)])


def _range(binding: Binding, symbols: Mapping[str, tuple[int, int, int]]) -> Range:
    triples = [symbols[d] if isinstance(d, str) else (d, d, d) for d in binding.shape]
    low, opt, high = zip(*triples, strict=True)
    return Range(low, opt, high)
