"""Example inputs of an engine: prefill and decode steps, with an adapter or dummies.

For tools that run a graph by themselves and want every input by name, such as polygraphy. Shapes
lie in the engine's profiles; tokens, cache and their order depend on the seed alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_lora.plugins.contract.sites import MIN_RANK, dummy_value
from trt_lora.plugins.contract.step import CACHE
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.engines.tensorrt.inputs import allows
from trt_lora.runtime.generation.decoding.kv_cache import cache_regions
from trt_lora.runtime.generation.decoding.step_inputs import (
    BOUND,
    INPUT_IDS,
    LENGTHS,
    Ids,
    token_inputs,
)
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.scripts.verification.numpy_or_torch import as_numpy_or_torch

Inputs = dict[str, Any]  # numpy arrays; torch's for bfloat16, which numpy does not have

_RANDOM_BATCH, _RANDOM_IDS = 2, 16  # as far as the engine goes


@dataclass(frozen=True)
class InputSpec:
    """Specification of example inputs: adapter, tokens, shape and number of steps."""

    adapter: Path | None = None  # None: rank-1 zeros, the base model
    prompt: str | None = None  # None: random tokens
    shape: tuple[int, int] | None = None  # batch and length of random tokens; None: small ones
    seed: int = 0
    iterations: int = 2  # prefill, decode, prefill, ... each with tokens of its own
    whole_cache: bool = True  # of the KV cache; else as long as the step needs (`FreeCacheLength`)


def make_inputs(directory: Path, manifest: Manifest, spec: InputSpec) -> list[Inputs]:
    """Return all inputs of every iteration; the LoRA inputs are the same arrays in each.

    A decode step has as many tokens before it as the prefill step, but a third less in every row
    but the first; its cache is random, for no engine has run yet.

    Args:
        directory: the engine, for its tokenizer.
        manifest: of the engine.
        spec: what to make.

    Raises:
        AdapterError: the adapter cannot be read, or the engine refuses it.
        ConfigError: the engine has no LoRA inputs or stacks of them, or no tokenizer, the shapes
            leave its profiles, or there are no iterations.
        BackendError: a bfloat16 engine without torch, or a prompt without tokenizers.
    """
    if spec.iterations < 1:
        raise ConfigError(f"--iterations is {spec.iterations}, expected 1 or more")
    lora = lora_inputs(manifest, spec.adapter, directory)
    steps = []
    for iteration in range(spec.iterations):
        rng = np.random.default_rng([spec.seed, iteration])
        ids = _ids(directory, manifest, spec, rng)
        step = _decode(manifest, ids, rng) if iteration % 2 else _prefill(manifest, ids)
        _check_profile(manifest, step, "decode" if iteration % 2 else "prefill")
        arrays = {**(step if spec.whole_cache else _shortened(step)), **lora}
        steps.append({b.name: as_numpy_or_torch(arrays[b.name], b.dtype) for b in manifest.inputs})
    return steps


def lora_inputs(
    manifest: Manifest, adapter: Path | None, directory: Path | None = None
) -> dict[str, Array]:
    """Return every LoRA input in the storage of its dtype: A [k, r], B [r, n] and vectors [n].

    Args:
        manifest: of the engine.
        adapter: None for dummies.
        directory: of the engine, whose weights DoRA needs.

    Raises:
        AdapterError: the adapter cannot be read, or the engine refuses it.
        ConfigError: the engine has no LoRA inputs, or stacks of them.
    """
    if manifest.max_loras:
        raise ConfigError(
            f"this engine of {manifest.base_model.name} takes {manifest.max_loras} adapters in a "
            "batch, and its inputs are made for one; use trt-lora verify, or an engine that is "
            "built without --max-loras"
        )
    if not manifest.sites:
        raise ConfigError(
            f"this engine of {manifest.base_model.name} has no LoRA inputs; build one with: "
            "build-engine --lora-target-modules all-linear"
        )
    inputs = {
        name: np.full(site.shape(factor, MIN_RANK), dummy_value(factor), storage_dtype(site.dtype))
        for name, (site, factor) in manifest.lora_bindings.items()
    }
    if adapter is not None:
        fitted = fit_adapter(
            load_adapter(adapter, manifest),
            manifest,
            rank_multiple=manifest.rank_multiple,
            directory=directory,
        )
        log_warnings(fitted.coverage.source, fitted.coverage.warnings)
        inputs |= {name: tensor.storage() for name, tensor in fitted.tensors.items()}
    return inputs


def _ids(directory: Path, manifest: Manifest, spec: InputSpec, rng: np.random.Generator) -> Ids:
    if spec.prompt is not None:
        return np.array([TextTokenizer(directory).encode(spec.prompt)], np.int64)
    longest = min(manifest.max_input_len, manifest.max_seq_len - 1)
    small = min(_RANDOM_BATCH, manifest.max_batch_size), min(_RANDOM_IDS, longest)
    return rng.integers(0, manifest.vocabulary_size, spec.shape or small)


def _prefill(manifest: Manifest, ids: Ids) -> dict[str, Array]:
    """All tokens [batch, s] at once, on a cache of zeros; logits of the last of each row."""
    lengths = np.zeros(len(ids), np.int64)
    return _step(manifest, ids, lengths, ids.shape[1], None)


def _decode(manifest: Manifest, ids: Ids, rng: np.random.Generator) -> dict[str, Array]:
    """The last token of each row [batch, 1], after as many as the engine and the row allow."""
    past = min(ids.shape[1], manifest.max_seq_len - 1)
    lengths = np.full(len(ids), past, np.int64)
    lengths[1:] -= past // 3
    return _step(manifest, ids[:, -1:], lengths, manifest.max_seq_len, rng)


def _step(
    manifest: Manifest, ids: Ids, lengths: Ids, bound: int, rng: np.random.Generator | None
) -> dict[str, Array]:
    batch, width = ids.shape
    kept = np.arange(1, batch + 1) * width - 1
    return token_inputs(ids, lengths, kept, bound) | _cache(manifest, batch, rng)


def _shortened(step: dict[str, Array]) -> dict[str, Array]:
    """A step with as much of its KV cache as it needs."""
    needed = int(step[LENGTHS].max()) + step[INPUT_IDS].shape[1]
    cache = {n: array[:, :, :needed].copy() for n, array in step.items() if n.startswith(CACHE)}
    return {**step, **cache, BOUND: step[BOUND][:needed]}


def _cache(manifest: Manifest, batch: int, rng: np.random.Generator | None) -> dict[str, Array]:
    """Every cache input [batch, kv_heads, max_len, dim]; zeros without a generator."""
    arrays = {}
    for binding in (region.binding for region in cache_regions(manifest, batch)):
        shape = batch, *map(int, binding.shape[1:])
        values = np.zeros(shape) if rng is None else rng.standard_normal(shape)
        arrays[binding.name] = values.astype(storage_dtype(binding.dtype))
    return arrays


def _check_profile(manifest: Manifest, step: Mapping[str, Array], profile: str) -> None:
    for name, allowed in manifest.profiles.get(profile, {}).items():
        if name in step and not allows(allowed, step[name].shape):
            raise ConfigError(
                f"{name} would be {list(step[name].shape)} in {profile}; this engine takes "
                f"{list(allowed.min)} to {list(allowed.max)}. Give a shorter prompt or smaller "
                "shapes, or build with a larger --max-input-len or --max-batch-size"
            )
