"""Adapters for the tests of blends and strengths."""

import numpy as np
from support.adapters.manager_setup import SITE, refreshed

from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.dtypes import Array


def delta(manager: LoRAManager, path: str) -> Array:
    """A @ B that an engine would apply at a site, in float64; zero from dummies."""
    tensors = refreshed(manager)
    a, b = (tensors[f"lora_{factor}_{path}"].numpy().astype(np.float64) for factor in "AB")
    return a @ b


def random_pair(seed: int, rank: int = 2, path: str = SITE) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((8, rank), np.float32), rng.standard_normal((rank, 6), np.float32)
    return {f"lora_A_{path}": a, f"lora_B_{path}": b}


def product(weights: dict[str, Array], path: str = SITE) -> Array:
    a, b = (weights[f"lora_{factor}_{path}"].astype(np.float64) for factor in "AB")
    return a @ b


def assert_near(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
