"""Strengths by prefix of module paths: the longest counts, and one that no site has is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.fakes.adapter_files import adapter_files
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.blend import Strength
from trt_lora.runtime.store.store import AdapterStore

FIRST, SECOND = (f"model.layers.{i}.self_attn" for i in (0, 1))
SITES = [f"{path}.{name}" for path in (FIRST, SECOND) for name in ("q_proj", "v_proj")]


@pytest.fixture(params=[0, 2], ids=["buffers", "slots"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    made = AdapterStore(FakeExecutor(replace(make_manifest(), max_loras=request.param)))
    for name, path in adapter_files(tmp_path, "ab").items():
        made.load(name, path)
    return made


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        ({"model": 0.5}, (0.5, 0.5, 0.5, 0.5)),
        ({FIRST: 0.25}, (0.25, 0.25, 1, 1)),
        ({"": 0.0, f"{SECOND}.v_proj": -2.0, SECOND: 3.0}, (0, 0, 3, -2)),
        ({"model.layers.1": 2, "model": 0, SITES[0]: 1}, (1, 0, 2, 2)),
    ],
)
def test_the_longest_prefix_of_a_site_says_its_strength(
    store: AdapterStore, tmp_path: Path, strength: Strength, expected: tuple[float, ...]
) -> None:
    store.blend("both", {"a": strength, "b": 0.5})
    a, b = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    found = store.lease("both").loaded.fitted
    for path, scale in zip(SITES, expected, strict=True):
        name = f"lora_B_{path}"
        scaled = np.concatenate([a[name] * np.float32(scale), b[name] * np.float32(0.5)])
        np.testing.assert_array_equal(found.tensors[name].numpy(), scaled)


@pytest.mark.parametrize(
    ("strength", "message"),
    [
        ({"model.layer": 1}, "'model.layer'; did you mean 'model.layers'"),
        ({"model.layers.1": 1, f"{FIRST}.q": 1}, f"0.self_attn.q'; did you mean '{FIRST}'"),
        ({"q_proj": 1}, "begins with, 'q_proj'"),
        ({7: 1}, "begins with, 7"),
        ({}, "adapter 'a' has no strengths; give a number, or prefixes .* {'model': 0.5}"),
        ({"model": float("inf")}, "adapter 'a' at 'model': a scale is inf"),
        ({"model": "1"}, "at 'model': a scale is a number"),
    ],
)
def test_what_is_no_strength_of_the_engines_sites_is_refused(
    store: AdapterStore, strength: Mapping[str, float], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        store.blend("x", {"b": 1, "a": strength})
    assert store.names == ("a", "b")
