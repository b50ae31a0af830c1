"""A tiny engine for fakes of TensorRT: manifest, directory, and what it computes.

It has everything an engine of this package has: tokens, a static KV cache that it writes in place,
and LoRA sites of different shapes:

    x = embedding[input_ids] + 0.1 * position              written to both caches at `lengths`
    h = the sum of a quarter of the keys and three quarters of the values, up to each position
    logits = down(up(h)), both with LoRA, at the places kept

As attention does, it multiplies what is masked by 0: what is no number there shows.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT
from trt_lora.runtime.files.file_record import file_record
from trt_lora.runtime.manifest import (
    ENCODER_FILES,
    MANIFEST_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    PLAN_FILE,
    BaseModel,
    Binding,
    EncoderPart,
    Manifest,
    Range,
    TokenRules,
)
from trt_lora.runtime.memory.dtypes import Array

Floats = npt.NDArray[np.float64]

VOCABULARY, WIDTH, INNER = 11, 4, 6
DECODE, PREFILL = 0, 1  # its profiles
MAX_BATCH, MAX_PROMPT, MAX_TOKENS, MAX_RANK = 4, 8, 16, 4
UP = Site("model.layers.0.up", WIDTH, INNER, "float32")
DOWN = Site("model.layers.0.down", INNER, VOCABULARY, "float32")
KEY, VALUE = "cache.0.key", "cache.0.value"
ACTIVATION_BYTES = 1000
PLAN, ENCODER_PLAN = b"the plan of the tiny model", b"the plan of its encoder"
CROSS_KEY, CROSS_VALUE = "cross.0.key", "cross.0.value"
ENCODER_SITE = Site("model.encoder.k", WIDTH, WIDTH, "float32")
MAX_SOURCE = 16

_random = np.random.default_rng(7)
EMBEDDING: Floats = _random.normal(size=(VOCABULARY, WIDTH))
BASE: dict[str, Floats] = {site.path: _random.normal(size=(site.k, site.n)) for site in (UP, DOWN)}


def small_manifest(
    flavour: str = "tensorrt-rtx", dtype: str = "float32", max_len: int = MAX_TOKENS
) -> Manifest:
    """Return the manifest of the tiny model with a cache of `max_len` places a row."""
    caches = [Binding(name, dtype, ("batch", 1, max_len, WIDTH)) for name in (KEY, VALUE)]
    inputs = (
        Binding("input_ids", "int64", ("batch", "sequence")),
        Binding("lengths", "int64", ("batch",)),
        Binding("kept", "int64", ("kept",)),
        Binding("bound", "bool", ("bound",)),
        *caches,
        *(
            Binding(f"lora_{factor}_{site.path}", site.dtype, shape)
            for site in (UP, DOWN)
            for factor, shape in (("A", (site.k, "rank")), ("B", ("rank", site.n)))
        ),
    )
    batch, rank = (1, 1, MAX_BATCH), (1, 2, MAX_RANK)
    decode = {"sequence": (1, 1, 1), "kept": batch, "bound": (max_len,) * 3}
    prefill = {
        "sequence": (1, MAX_PROMPT, MAX_PROMPT),
        "kept": (1, 1, MAX_PROMPT),
        "bound": (1, MAX_PROMPT, max_len),
    }
    known = {"batch": batch, "rank": rank}
    return Manifest(
        base_model=BaseModel("tiny", "TinyForCausalLM", "0" * 64, (0,), 0),
        binding_names=BindingNames.LORA,
        sites=(UP, DOWN),
        inputs=inputs,
        outputs=(
            Binding("logits", "float32", ("kept", VOCABULARY)),
            *(replace(b, name=f"new_{b.name}", in_place_of=b.name) for b in caches),
        ),
        profiles={
            name: {binding.name: _range(binding, symbols | known) for binding in inputs}
            for name, symbols in (("decode", decode), ("prefill", prefill))
        },
        max_batch_size=MAX_BATCH,
        max_input_len=MAX_PROMPT,
        max_seq_len=max_len,
        max_lora_rank=MAX_RANK,
        opt_lora_rank=2,
        dtype=dtype,
        flavour=flavour,
        versions={"tensorrt-rtx": "1.7"},
        files={},
    )


def encoder_manifest() -> Manifest:
    """Return the manifest of the tiny model with an encoder, to whose output the step is blind."""
    single = small_manifest()
    cross = [
        Binding(name, "float32", ("batch", 1, MAX_SOURCE, WIDTH))
        for name in (CROSS_KEY, CROSS_VALUE)
    ]
    inputs = (
        Binding("source", "int64", ("batch", "source_size")),
        *cross,
        Binding(f"lora_A_{ENCODER_SITE.path}", "float32", (WIDTH, "rank")),
        Binding(f"lora_B_{ENCODER_SITE.path}", "float32", ("rank", WIDTH)),
    )
    sizes = {"batch": (1, 1, 1), "rank": (1, 2, MAX_RANK), "source_size": (1, 4, MAX_SOURCE)}
    part = EncoderPart(
        inputs=inputs,
        outputs=tuple(replace(b, name=f"new_{b.name}", in_place_of=b.name) for b in cross),
        profiles={"encode": {binding.name: _range(binding, sizes) for binding in inputs}},
        max_source_len=MAX_SOURCE,
        rules=TokenRules(start=0),
    )
    more = (Binding("source_lengths", "int64", ("batch",)), *cross)
    ranges = {binding.name: _range(binding, {"batch": (1, 1, MAX_BATCH)}) for binding in more}
    return replace(
        single,
        sites=(*single.sites, ENCODER_SITE),
        inputs=(*single.inputs, *more),
        profiles={name: {**found, **ranges} for name, found in single.profiles.items()},
        encoder=part,
    )


def tiny_encoder(views: Mapping[str, Array]) -> dict[str, Array]:
    """Write a source's embeddings, as keys with LoRA, and nothing else."""
    x = EMBEDDING.astype(np.float32)[views["source"]]
    a, b = (views[f"lora_{factor}_{ENCODER_SITE.path}"] for factor in ("A", "B"))
    size = x.shape[1]
    views[f"new_{CROSS_KEY}"][:, 0, :size] = x + (x @ a) @ b
    views[f"new_{CROSS_VALUE}"][:, 0, :size] = x
    return {}


def slots_manifest(slots: int) -> Manifest:
    """Return the manifest of the tiny model where every row has an adapter of its own."""
    single = small_manifest()
    loras = single.lora_bindings
    stacks = {n: (slots, *site.shape(f, MAX_RANK)) for n, (site, f) in loras.items()}
    rows = {LORA_SLOT: ("slot_rows",), LORA_RANK: ("slots", len(single.sites))}
    inputs = (
        *(binding for binding in single.inputs if binding.name not in loras),
        *(Binding(n, "float32", ("slots", *shape[1:])) for n, shape in stacks.items()),
        *(Binding(name, "int32", shape) for name, shape in rows.items()),
    )
    sizes = {"slot_rows": (1, 1, MAX_BATCH), "slots": (1, slots, slots)}
    ranges = {b.name: _range(b, sizes) for b in inputs if b.name in stacks.keys() | rows.keys()}
    profiles = {name: {**found, **ranges} for name, found in single.profiles.items()}
    return replace(single, inputs=inputs, profiles=profiles, max_loras=slots)


def _range(binding: Binding, symbols: Mapping[str, tuple[int, int, int]]) -> Range:
    triples = [symbols[d] if isinstance(d, str) else (d, d, d) for d in binding.shape]
    low, opt, high = zip(*triples, strict=True)
    return Range(low, opt, high)


def engine_directory(directory: Path, manifest: Manifest | None = None) -> Path:
    """Write the plan and the manifest of the tiny model, and ONNX files that hold nothing."""
    manifest = manifest or small_manifest()
    directory.mkdir(parents=True, exist_ok=True)
    contents = {PLAN_FILE: PLAN, ONNX_FILE: b"no graph", ONNX_WEIGHTS_FILE: b"no weights"}
    if manifest.encoder:
        contents[ENCODER_FILES.plan] = ENCODER_PLAN
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    records = {name: file_record(directory / name) for name in contents}
    fields = {**vars(manifest), "files": records}
    (directory / MANIFEST_FILE).write_text(Manifest(**fields).to_json(), encoding="utf-8")
    return directory


def tiny_model(views: Mapping[str, Array]) -> dict[str, Array]:
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


def _delta_of_rows(slot: Array, h: Array, a: Array, b: Array) -> Array:
    """Each row's, of its slot; zero where that is none. One slot may stand for all rows."""
    slots = np.broadcast_to(slot, len(h))
    zero = np.zeros((*h.shape[1:-1], b.shape[-1]), np.float32)
    return np.stack([(x @ a[s]) @ b[s] if s >= 0 else zero for x, s in zip(h, slots, strict=True)])


def expected_logits(ids: npt.NDArray[np.int64], adapter: Mapping[str, Array]) -> Floats:
    """Return logits [s, vocab] of one sequence: in float64, without a cache, weights merged."""
    h: Floats = (EMBEDDING[ids] + 0.1 * np.arange(len(ids))[:, None]).cumsum(axis=0)
    for site in (UP, DOWN):
        weight = BASE[site.path]
        if f"lora_A_{site.path}" in adapter:
            a, b = (adapter[f"lora_{factor}_{site.path}"] for factor in ("A", "B"))
            weight = weight + a.astype(np.float64) @ b.astype(np.float64)
        h = h @ weight
    return h
