"""TensorRT-LLM's adapters: `model.lora_weights.npy` and `model.lora_config.npy`.

A row of the config is (module id, layer, rank) or (module id, layer, rank, is DoRA); the row of the
weights beside it is A [r, k] and then B [n, r], the scale in B, each flattened, padded with zeros.
Of experts A is [E, r, k] and B [E, n, r], gate and up in rows of their own.
Both arrays may have a first dimension of 1. The files hold neither k nor n: those are the engine's.
Source: TensorRT-LLM's `examples/hf_lora_convert.py` and its documentation of the format.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trt_lora.plugins.contract.modules import (
    MODULES,
    PART_SUFFIXES,
    PARTS,
    is_experts,
    module_of,
    parts_of,
)
from trt_lora.plugins.contract.sites import Site, layer_of
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Pair, Weight, concatenate
from trt_lora.runtime.files.npy_file import NpyFile, npy_of_array, open_npy
from trt_lora.runtime.files.untrusted_file import ReadBuffer, file_inside
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

TRTLLM_WEIGHTS = "model.lora_weights.npy"
TRTLLM_CONFIG = "model.lora_config.npy"
_FILES = {TRTLLM_WEIGHTS: ("float32", "float16", "bfloat16"), TRTLLM_CONFIG: ("int32",)}

_MODULES = {module.id: module for module in MODULES if module.id is not None}
_MAX_PARTS = max(len(parts) for parts in PARTS.values())  # rows that one site can take
_SWAPPED = "mlp_gate_up"  # TensorRT-LLM keeps its two halves the other way round
_STORED: dict[str, Any] = {"float32": "<f4", "float16": "<f2", "bfloat16": "V2"}


def adapter_from_trtllm(directory: Path, manifest: Manifest | None) -> Adapter:
    """Read the two files; the engine's sites say how a row is divided.

    Raises:
        AdapterError: there is no manifest, a file is damaged, or a row is for a module that the
            engine does not have, or too short for it. Whether it ends in zeros shows when it is
            read.
    """
    if manifest is None:
        raise AdapterError(
            f"{directory}: TensorRT-LLM's format holds no shapes; load it after "
            "initialize_engine_bindings, or convert it with --engine DIR"
        )
    weights, config = (
        open_npy(file_inside(directory, name), dtypes) for name, dtypes in _FILES.items()
    )
    return _from_arrays(str(directory), weights, config, manifest)


def adapter_from_trtllm_arrays(
    source: str, weights: Array, config: Array, manifest: Manifest
) -> Adapter:
    """Return the adapter of a request that carries the two arrays; fit it before they change.

    Args:
        source: what messages call it.
        weights: [rows, width] or [1, rows, width]; float32, float16 or bfloat16, also as voids.
        config: int32 [rows, 3 or 4], or 1 before them.
        manifest: of the engine, whose sites say how a row is divided.

    Raises:
        AdapterError: as `adapter_from_trtllm`.
    """
    weights_file, config_file = (
        npy_of_array(f"{source}/{name}", array, dtypes)
        for array, (name, dtypes) in zip((weights, config), _FILES.items(), strict=True)
    )
    return _from_arrays(source, weights_file, config_file, manifest)


def _from_arrays(source: str, weights: NpyFile, config: NpyFile, manifest: Manifest) -> Adapter:
    rows = _rows(config, weights, source, most=_MAX_PARTS * len(manifest.sites))
    places = _places(manifest)
    pairs: dict[str, Pair] = {}
    for number, row in enumerate(rows):
        label = f"{source}: row {number} of {TRTLLM_CONFIG}"
        place = _locate_site(row[0], row[1], places, f"{label}, for {manifest.base_model.name},")
        if place.path in pairs:
            raise AdapterError(f"{label} is for {place.path}, and so is another row")
        pairs[place.path] = _pair(weights, number, row, place, label)
    return Adapter.of_pairs(source, pairs)


def _rows(config: NpyFile, weights: NpyFile, source: str, *, most: int) -> list[list[int]]:
    """The rows of the config as integers, three or four each."""
    shapes = [s[1:] if len(s) == 3 and s[0] == 1 else s for s in (config.shape, weights.shape)]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] not in (3, 4):
        raise AdapterError(
            f"{source}: {TRTLLM_CONFIG} has shape {list(config.shape)} and {TRTLLM_WEIGHTS} "
            f"{list(weights.shape)}, expected [rows, 3 or 4] and [rows, width], or 1 before them"
        )
    if shapes[0][0] != shapes[1][0] or not shapes[0][0]:
        raise AdapterError(f"{source}: {shapes[0][0]} rows of config, {shapes[1][0]} of weights")
    if shapes[0][0] > most:
        raise AdapterError(f"{source}: {shapes[0][0]} rows; this engine takes {most} at most")
    rows: list[list[int]] = config.read(0, math.prod(shapes[0]), None).reshape(shapes[0]).tolist()
    return rows


def _pair(weights: NpyFile, number: int, row: list[int], place: "_Place", label: str) -> Pair:
    module, rank, width = _MODULES[row[0]], row[2], weights.shape[-1]
    k, n, leading = place.k, place.n, (place.experts,) * bool(place.experts)
    each = rank * max(place.experts, 1)  # values for every row of A and column of B
    if len(row) == 4 and row[3]:
        raise AdapterError(f"{label} is DoRA's, which an engine cannot apply; train a plain LoRA")
    if rank < 1 or each * (k + n) > width:
        of_experts = f" of {place.experts} experts" if place.experts else ""
        raise AdapterError(
            f"{label} has rank {rank} for k={k} and n={n}{of_experts}, which takes "
            f"{each * (k + n)} values; the row has {width}: it is for another base model"
        )
    first = number * width

    def read_a(buffer: ReadBuffer | None = None) -> Array:
        return weights.read(first, each * k, buffer).reshape(*leading, rank, k).swapaxes(-1, -2)

    def read_b(buffer: ReadBuffer | None = None) -> Array:
        rest = weights.read(first + each * k, width - each * k, buffer)
        if rest[each * n :].any():
            raise AdapterError(f"{label}: the row goes on after rank {rank}: another base model's?")
        return rest[: each * n].reshape(*leading, n, rank).swapaxes(-1, -2)

    names = tuple(f"{TRTLLM_WEIGHTS}[{number}].{factor}" for factor in "AB")
    a = Weight((names[0],), (*leading, k, rank), weights.dtype, read_a)
    b = Weight((names[1],), (*leading, rank, n), weights.dtype, read_b)
    return a, _exchanged(b) if module.name == _SWAPPED else b


def _exchanged(b: Weight) -> Weight:
    """B with its two halves exchanged."""
    half = b.shape[1] // 2
    return concatenate([b.part(1, half, b.shape[1]), b.part(1, 0, half)], axis=1)


# ----------------------------------------------------------------------- module and layer <-> path


class _Place(NamedTuple):
    """What a row is for."""

    path: str
    k: int
    n: int
    experts: int = 0


def _places(manifest: Manifest) -> dict[tuple[int | None, str], list[_Place]]:
    """Where a row of a layer and a module belongs: a site, a part of one, or made of some."""
    places: dict[tuple[int | None, str], list[_Place]] = defaultdict(list)
    parts: dict[tuple[int | None, str], list[Site]] = defaultdict(list)
    for site in manifest.sites:
        if site.module is not None:
            whole = _Place(site.path, site.k, site.n, site.experts)
            places[site.layer, site.module.name].append(whole)
            for name, width in zip(parts_of(site.path), site.parts, strict=False):
                part = _Place(_beside(site, name), site.k, width, site.experts)
                places[site.layer, name].append(part)
            for fused, names in PARTS.items():
                if site.module.name in names and fused in PART_SUFFIXES:
                    parts[site.layer, fused].append(site)
    for (layer, fused), sites in parts.items():
        path, *others = {_beside(site, fused) for site in sites}
        if len(sites) == len(PARTS[fused]) and not others:
            places[layer, fused].append(_Place(path, sites[0].k, sum(site.n for site in sites)))
    return places


def _beside(site: Site, module: str) -> str:
    """The path of a module beside a site."""
    return f"{site.path.rpartition('.')[0]}.{PART_SUFFIXES[module]}"


def _locate_site(
    module_id: int, layer: int, places: Mapping[tuple[int | None, str], list[_Place]], label: str
) -> _Place:
    module = _MODULES.get(module_id)
    if module is None:
        raise AdapterError(f"{label} has module id {module_id}; known are 0 to {max(_MODULES)}")
    matches = places.get((layer, module.name), [])
    if len(matches) != 1:
        raise AdapterError(
            f"{label} is {module.name} of layer {layer}, for which the engine has "
            f"{len(matches) or 'no'} sites"
        )
    if module.name in PARTS and not parts_of(matches[0].path):
        raise AdapterError(f"{label}: {matches[0].path} alternates heads, TensorRT-LLM does not")
    return matches[0]


# ----------------------------------------------------------------------------------------- writing


def save_trtllm(adapter: Adapter, directory: Path, dtype: str) -> Conversion:
    """Write the two files as TensorRT-LLM's converter does: four columns, a first dimension of 1.

    Raises:
        AdapterError: a module has no id or no layer, two are one to TensorRT-LLM, or a value
            leaves the range of `dtype`.
    """
    pairs = _numbered(adapter)
    width = max(math.prod(a.shape) + math.prod(b.shape) for a, b in pairs.values())
    weights = np.zeros((1, len(pairs), width), _STORED[dtype])
    conversions = [
        _write_row(pair, weights[0, number], dtype, adapter.source)
        for number, pair in enumerate(pairs.values())
    ]
    ranks = [a.shape[-1] for a, _ in pairs.values()]
    config = [[module, layer, rank, 0] for (layer, module), rank in zip(pairs, ranks, strict=True)]
    np.save(directory / TRTLLM_WEIGHTS, weights, allow_pickle=False)
    np.save(directory / TRTLLM_CONFIG, np.array([config], np.int32), allow_pickle=False)
    return Conversion.of_all(conversions)


def _rows_of(pairs: Mapping[str, Pair]) -> Iterator[tuple[str, Pair]]:
    """The pairs, gate and up of experts apart."""
    for path, (a, b) in pairs.items():
        if not is_experts(path) or not parts_of(path):
            yield path, (a, b)
            continue
        half = b.shape[-1] // 2
        for number, name in enumerate(parts_of(path)):
            own = b.part(2, number * half, (number + 1) * half)
            yield f"{path.rpartition('.')[0]}.{PART_SUFFIXES[name]}", (a, own)


def _numbered(adapter: Adapter) -> Mapping[tuple[int, int], Pair]:
    """The pairs by (layer, module id), in that order."""
    found: dict[tuple[int, int], tuple[str, Pair]] = {}
    for path, (a, b) in _rows_of(adapter.pairs()):
        module, layer = module_of(path), layer_of(path)
        if module is None or module.id is None or layer is None:
            raise AdapterError(
                f"{adapter.source}: TensorRT-LLM has no module id or no layer for {path}"
            )
        if module.name in PARTS and not parts_of(path):
            raise AdapterError(f"{adapter.source}: {path} alternates heads, TensorRT-LLM does not")
        key = (layer, module.id)
        if key in found:
            raise AdapterError(
                f"{adapter.source}: {path} and {found[key][0]} are both {module.name} of layer "
                f"{layer} to TensorRT-LLM"
            )
        found[key] = path, (a, _exchanged(b) if module.name == _SWAPPED else b)
    return {key: pair for key, (_, pair) in sorted(found.items())}


def _write_row(pair: Pair, row: Array, dtype: str, source: str) -> Conversion:
    stored = {"A": pair[0].transposed(), "B": pair[1].transposed()}  # [.., r, k] and [.., n, r]
    tensors, conversions = pack_weights(stored, dict.fromkeys(stored, dtype), source)
    flat = np.concatenate([tensors[factor].storage().reshape(-1) for factor in "AB"])
    row[: flat.size] = flat.view(row.dtype)
    return Conversion.of_all(conversions.values())
