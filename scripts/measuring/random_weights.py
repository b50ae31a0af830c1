"""Random weights in memory: an adapter of any rank for any engine."""

import numpy as np

from trt_lora.plugins.contract.sites import FACTORS
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_storage

_POOL = 1 << 22  # distinct values, repeated: making a billion would take a minute
_SCALE = 0.01  # small beside a model's activations, so that no dtype's range is left


def random_values(dtype: str, seed: int = 0) -> Array:
    """Return small values, as many as weights repeat: numpy has them as `storage_dtype` says."""
    values = np.random.default_rng(seed).standard_normal(_POOL, np.float32)
    return (np.float32(_SCALE) * values).astype(storage_dtype(dtype))


def random_weights(manifest: Manifest, rank: int, seed: int = 0) -> dict[str, Tensor]:
    """Return A [k, rank] and B [rank, n] of every site, by binding, in the engine's dtypes.

    Args:
        manifest: of the engine.
        rank: of every site.
        seed: other seeds, other values.
    """
    pools = {site.dtype: random_values(site.dtype, seed) for site in manifest.sites}
    return {
        name: tensor_from_storage(_filled(pools[site.dtype], site.shape(factor, rank)), site.dtype)
        for name, (site, factor) in manifest.lora_bindings.items()
        if factor in FACTORS
    }


def _filled(pool: Array, shape: tuple[int, ...]) -> Array:
    """Memory of its own, as a real weight has; `np.resize` would keep the whole pool for each."""
    filled = np.empty(shape, pool.dtype)
    flat = filled.reshape(-1)
    for start in range(0, flat.size, pool.size):
        flat[start : start + pool.size] = pool[: flat.size - start]
    return filled
