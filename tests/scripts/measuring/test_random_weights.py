"""Random weights: of every site, each in memory of its own."""

from itertools import pairwise

import numpy as np
import pytest
from support.fakes.fake_engine import make_manifest

from trt_lora.scripts.measuring.random_weights import random_weights


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_site_has_a_and_b_of_the_rank_in_the_engines_dtype(dtype: str) -> None:
    manifest = make_manifest(k=8, n=6, dtype=dtype)
    weights = random_weights(manifest, 4)
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == {
        f"lora_{factor}_{site.path}": ((8, 4) if factor == "A" else (4, 6), dtype)
        for site in manifest.sites
        for factor in "AB"
    }
    for weight in weights.values():
        values = weight.read_storage().astype(np.float32)
        assert np.isfinite(values).all()
        assert 0 < abs(values).max() < 1


def test_a_weight_holds_its_own_bytes_and_no_more() -> None:
    """All weights of a model in one small pool would lie in the cache of any processor."""
    weights = list(random_weights(make_manifest(k=3000, n=2000), 1024).values())
    pointers = sorted((weight.pointer, weight.nbytes) for weight in weights)
    for (pointer, nbytes), (after, _) in pairwise(pointers):
        assert pointer + nbytes <= after
    for weight in weights:
        base = weight.owner if isinstance(weight.owner, np.ndarray) else weight.read_storage()
        while base.base is not None:
            base = base.base
        assert base.nbytes == weight.nbytes


def test_another_seed_gives_other_values() -> None:
    one, other = (random_weights(make_manifest(), 4, seed) for seed in (0, 1))
    assert all((one[name].numpy() != other[name].numpy()).any() for name in one)
