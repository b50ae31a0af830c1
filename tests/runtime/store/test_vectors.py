"""Vectors in a store: dummies of ones and zeros, a row of each slot, the base model's last."""

from dataclasses import replace

import numpy as np
import pytest
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights
from support.refusals import refused

from trt_lora.plugins.contract.sites import FACTORS
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import tensor_from_numpy
from trt_lora.runtime.store.slot_stacks import SlotStacks, slot_nbytes, stacks_nbytes
from trt_lora.runtime.store.store import AdapterStore

SLOTS, N = 3, 6
PLAIN = make_manifest(n=N)
SINGLE = replace(PLAIN, lora_vectors=True)
SLOTTED = replace(SINGLE, max_loras=SLOTS)
SITES = [site.path for site in SINGLE.sites]
SCALE, BIAS = f"lora_scale_{SITES[0]}", f"lora_bias_{SITES[0]}"
SCALES = [name for name in SINGLE.lora_bindings if name.startswith("lora_scale")]
BIASES = [name for name in SINGLE.lora_bindings if name.startswith("lora_bias")]


def adapter(seed: int, *, vectors: bool = True) -> Adapter:
    """Random; vectors at the first site alone."""
    weights = make_weights(SINGLE, seed=seed)
    kept = {n for n, (_, kind) in SINGLE.lora_bindings.items() if kind in FACTORS}
    kept |= {SCALE, BIAS} if vectors else set()
    tensors = {n: weight_of(n, tensor_from_numpy(w)) for n, w in weights.items() if n in kept}
    return Adapter(f"adapter {seed}", tensors)


def store(manifest: Manifest) -> AdapterStore:
    made = AdapterStore(FakeExecutor(manifest))
    made.add("a", adapter(1))
    made.add("b", adapter(2, vectors=False))
    return made


def given(seed: int, name: str) -> Array:
    return make_weights(SINGLE, seed=seed)[name]


def test_without_an_adapter_every_scale_is_ones_and_every_bias_zeros() -> None:
    bound = store(SINGLE).bindings.rows([None])
    assert bound.keys() >= {*SCALES, *BIASES}
    for name in SCALES:
        assert bound[name].numpy().tolist() == [1] * N
    for name in BIASES:
        assert bound[name].numpy().tolist() == [0] * N


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ones_are_of_the_sites_dtype(dtype: str) -> None:
    manifest = replace(make_manifest(dtype=dtype), lora_vectors=True)
    bound = AdapterStore(FakeExecutor(manifest)).bindings.rows([None])
    assert bound[SCALE].dtype == dtype
    assert bound[SCALE].numpy().tolist() == [1] * N


def test_an_adapter_binds_its_vectors_and_dummies_elsewhere() -> None:
    bound = store(SINGLE).bindings.rows(["a"])
    np.testing.assert_array_equal(bound[SCALE].numpy(), given(1, SCALE))
    np.testing.assert_array_equal(bound[BIAS].numpy(), given(1, BIAS))
    assert bound[SCALES[1]].numpy().tolist() == [1] * N


def test_a_row_finds_its_vectors_from_the_first_slot_of_the_step_on() -> None:
    made = store(SLOTTED)
    made.add("c", adapter(3))
    made.bindings.rows(["a", "b", "c"])  # slots 0, 1, 2
    for names in (["c", None, "b"], ["a", None], ["c"], [None]):
        for all_slots in (False, True):
            bound = made.bindings.rows(names, all_slots=all_slots)
            found = bound[SCALE].numpy()[bound["lora_slot"].numpy()]  # -1 is the last
            for row, name in zip(found, names, strict=True):
                expected = given({"a": 1, "c": 3}[name], SCALE) if name in ("a", "c") else 1
                np.testing.assert_array_equal(row, np.broadcast_to(expected, N))
            assert not bound[BIASES[1]].numpy().any()
    made.check_integrity()


def test_a_slot_forgets_the_vectors_of_the_one_before() -> None:
    made = store(SLOTTED)
    made.bindings.rows(["a"])
    made.unload("a")
    bound = made.bindings.rows(["b"])
    assert bound["lora_slot"].numpy().tolist() == [0]
    assert bound[SCALE].numpy()[0].tolist() == [1] * N
    assert bound[BIAS].numpy()[0].tolist() == [0] * N


def test_vectors_are_counted() -> None:
    plain = replace(PLAIN, max_loras=SLOTS)
    assert slot_nbytes(SLOTTED) - slot_nbytes(plain) == 2 * len(SITES) * 256  # aligned
    assert stacks_nbytes(SLOTTED) > stacks_nbytes(plain)
    single = store(SINGLE)
    assert single.info("a").nbytes - single.info("b").nbytes == 4 * 2 * N


@pytest.mark.parametrize("manifest", [SINGLE, SLOTTED])
def test_another_strength_and_a_blend_are_refused_by_name(manifest: Manifest) -> None:
    made = store(manifest)
    with refused(AdapterError, "adapter 1", "DoRA", "strength"):
        made.bindings.rows(["a@0.5"])
    with refused(AdapterError, "adapter 1", "blend"):
        made.blend("sum", {"a": 0.5, "b": 0.5})
    assert made.bindings.rows(["b@0.5"])
    assert made.bindings.rows(["a"])
    made.check_integrity()


class DeviceMemory(HostMemory):
    """Memory that is written to through `write` and `clear` alone, as a GPU's is."""

    device = "cuda:0"


def test_a_device_holds_what_the_host_would() -> None:
    held = []
    for memory in (HostMemory(), DeviceMemory()):
        stacks = SlotStacks(SLOTTED, memory)
        fitted = [fit_adapter(adapter(1), SLOTTED), fit_adapter(adapter(2, vectors=False), SLOTTED)]
        for slot, each in ((0, fitted[0]), (1, fitted[0]), (1, fitted[1]), (2, fitted[0])):
            stacks.place(slot, each)
        stacks.clear(2)
        views = stacks.views(0, SLOTS).items()
        held.append({name: replace(t, device="cpu").numpy().copy() for name, t in views})
    for name, expected in held[0].items():
        np.testing.assert_array_equal(held[1][name], expected, err_msg=name)
    assert held[1][SCALE][1:].tolist() == [[1] * N] * SLOTS
