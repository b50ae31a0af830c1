"""A tiny engine for fakes of TensorRT: manifest, directory, and what it computes.

It has everything an engine of this package has: tokens, mask, positions, a cache and LoRA sites of
different shapes:

    x = embedding[input_ids] + 0.1 * position_ids          present = past, then x
    h = the sum of what the mask shows of present, up to each position
    logits = down(up(h)), both with LoRA
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.runtime.files.file_record import file_record
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    PLAN_FILE,
    BaseModel,
    Binding,
    Manifest,
    Range,
)
from trt_lora.runtime.memory.dtypes import Array

Floats = npt.NDArray[np.float64]

VOCABULARY, WIDTH, INNER = 11, 4, 6
DECODE, PREFILL = 0, 1  # its profiles
MAX_BATCH, MAX_PROMPT, MAX_TOKENS, MAX_RANK = 2, 8, 16, 4
UP = Site("model.layers.0.up", WIDTH, INNER, "float32")
DOWN = Site("model.layers.0.down", INNER, VOCABULARY, "float32")
PAST, PRESENT = "past_key_values.0.key", "present.0.key"
ACTIVATION_BYTES = 1000
PLAN = b"the plan of the tiny model"

_random = np.random.default_rng(7)
EMBEDDING: Floats = _random.normal(size=(VOCABULARY, WIDTH))
BASE: dict[str, Floats] = {site.path: _random.normal(size=(site.k, site.n)) for site in (UP, DOWN)}


def small_manifest(flavour: str = "tensorrt-rtx", dtype: str = "float32") -> Manifest:
    """Return the manifest of the tiny model."""
    rank = (1, 2, MAX_RANK)
    batch = (1, 1, MAX_BATCH)
    sizes: dict[str, dict[str, tuple[int, int, int]]] = {
        "decode": {
            "sequence": (1, 1, 1),
            "past": (1, 8, MAX_TOKENS - 1),
            "total": (2, 9, MAX_TOKENS),
            "kept": (1, 1, 1),
        },
        "prefill": {
            "sequence": (1, MAX_PROMPT, MAX_PROMPT),
            "past": (0, 0, MAX_TOKENS - 1),
            "total": (1, MAX_PROMPT, MAX_TOKENS),
            "kept": (1, 1, MAX_PROMPT),
        },
    }
    inputs = (
        Binding("input_ids", "int64", ("batch", "sequence")),
        Binding("attention_mask", "int64", ("batch", "total")),
        Binding("position_ids", "int64", ("batch", "sequence")),
        Binding("logits_to_keep", "int64", ("kept",)),
        Binding(PAST, dtype, ("batch", 1, "past", WIDTH)),
        *(
            Binding(f"lora_{factor}_{site.path}", site.dtype, shape)
            for site in (UP, DOWN)
            for factor, shape in (("A", (site.k, "rank")), ("B", ("rank", site.n)))
        ),
    )

    def allowed(binding: Binding, symbols: Mapping[str, tuple[int, int, int]]) -> Range:
        known = {**symbols, "batch": batch, "rank": rank}
        triples = [known[d] if isinstance(d, str) else (d, d, d) for d in binding.shape]
        return Range(*(tuple(triple[i] for triple in triples) for i in range(3)))

    return Manifest(
        base_model=BaseModel("tiny", "TinyForCausalLM", "0" * 64, (0,), 0),
        binding_names=BindingNames.LORA,
        sites=(UP, DOWN),
        inputs=inputs,
        outputs=(
            Binding("logits", "float32", ("batch", "kept", VOCABULARY)),
            Binding(PRESENT, dtype, ("batch", 1, "total", WIDTH)),
        ),
        profiles={
            name: {binding.name: allowed(binding, symbols) for binding in inputs}
            for name, symbols in sizes.items()
        },
        max_batch_size=MAX_BATCH,
        max_input_len=MAX_PROMPT,
        max_seq_len=MAX_TOKENS,
        max_lora_rank=MAX_RANK,
        opt_lora_rank=2,
        dtype=dtype,
        flavour=flavour,
        versions={"tensorrt-rtx": "1.7"},
        files={},
    )


def engine_directory(directory: Path, manifest: Manifest | None = None) -> Path:
    """Write the plan and the manifest of the tiny model, and ONNX files that hold nothing."""
    manifest = manifest or small_manifest()
    directory.mkdir(parents=True, exist_ok=True)
    contents = {PLAN_FILE: PLAN, ONNX_FILE: b"no graph", ONNX_WEIGHTS_FILE: b"no weights"}
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    records = {name: file_record(directory / name) for name in contents}
    fields = {**vars(manifest), "files": records}
    (directory / MANIFEST_FILE).write_text(Manifest(**fields).to_json(), encoding="utf-8")
    return directory


def tiny_model(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Compute the outputs in float32, as the engine does."""
    x = EMBEDDING.astype(np.float32)[inputs["input_ids"]]
    x = x + np.float32(0.1) * inputs["position_ids"][..., None].astype(np.float32)
    keys = np.concatenate([inputs[PAST], x[:, None]], axis=2)
    shown = keys[:, 0] * inputs["attention_mask"][..., None].astype(np.float32)
    h = shown.cumsum(axis=1, dtype=np.float32)[:, keys.shape[2] - x.shape[1] :]
    for site in (UP, DOWN):
        a, b = inputs[f"lora_A_{site.path}"], inputs[f"lora_B_{site.path}"]
        h = h @ BASE[site.path].astype(np.float32) + (h @ a) @ b
    return {"logits": h[:, inputs["logits_to_keep"]], PRESENT: keys}


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
