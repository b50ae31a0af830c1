"""Adapters in TensorRT-LLM's format, for tests."""

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

WEIGHTS, CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
LAYER = "model.layers.{}.self_attn.{}"


def manifest_of(*sites: Site) -> Manifest:
    return replace(make_manifest(), sites=sites)


def site(path: str, k: int = 4, n: int = 4, parts: tuple[int, ...] = ()) -> Site:
    return Site(path, k, n, "float32", parts)


Q = LAYER.format(0, "q_proj")


def factors(rank: int, k: int = 4, n: int = 4, seed: int = 0) -> tuple[Array, Array]:
    """A [r, k] and B [n, r] of small integers other than zero, which every dtype holds."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 9, rank * (k + n)) * rng.choice([-1.0, 1.0], rank * (k + n))
    values = values.astype(np.float32)
    return values[: rank * k].reshape(rank, k), values[rank * k :].reshape(n, rank)


def rows_of(pairs: Sequence[tuple[Array, Array]]) -> Array:
    """[rows, width]: A and then B, flattened, zeros behind."""
    flat = [np.concatenate([a.reshape(-1), b.reshape(-1)]) for a, b in pairs]
    rows = np.zeros((len(flat), max(row.size for row in flat)), np.float32)
    for row, values in zip(rows, flat, strict=True):
        row[: values.size] = values
    return rows


def stored(values: Array, dtype: str) -> Array:
    """The values as TensorRT-LLM's converter stores them; bfloat16 as two-byte voids."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return values.astype(ml_dtypes.bfloat16).view("V2")


def delta(a: Array, b: Array) -> Array:
    """[k, n] of A [r, k] and B [n, r]."""
    return (b.astype(np.float64) @ a.astype(np.float64)).T


PARTS = {"q_proj": 6, "k_proj": 2, "v_proj": 2}
FUSED_QKV = manifest_of(site(LAYER.format(0, "qkv_proj"), 3, 10, (6, 2, 2)))


MLP = "model.layers.0.mlp."
