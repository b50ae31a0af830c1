"""Stacks of slots: where an adapter goes, what is left around it, and what a step binds of it."""

from dataclasses import replace

import numpy as np
import pytest
from support.fakes.fake_engine import make_manifest, make_weights

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy
from trt_lora.runtime.store.slot_stacks import SlotStacks, stacks_nbytes

SLOTS = 3
MANIFEST = replace(make_manifest(), max_loras=SLOTS)
SITES = [site.path for site in MANIFEST.sites]
A, B = (f"lora_{factor}_{SITES[1]}" for factor in "AB")


def fitted(rank: int, *, seed: int = 0, only: str = "") -> Fitted:
    """A random adapter of one rank, at the sites whose path ends with `only`."""
    weights = make_weights(MANIFEST, rank=rank, seed=seed)
    taken = {n: weight_of(n, tensor_from_numpy(w)) for n, w in weights.items() if n.endswith(only)}
    return fit_adapter(Adapter("adapter", taken), MANIFEST)


def stacks() -> SlotStacks:
    return SlotStacks(MANIFEST, HostMemory())


def held(stacks: SlotStacks) -> dict[str, Array]:
    """All that the slots hold."""
    return {name: t.numpy().copy() for name, t in stacks.views(0, SLOTS).items()}


def test_an_adapter_lies_in_its_slot_with_zeros_behind_its_rank() -> None:
    made, adapter = stacks(), fitted(5)
    made.place(1, adapter)
    for name, stack in held(made).items():
        assert stack.shape[0] == SLOTS
        assert not stack[[0, 2]].any()
        if name != "lora_rank":
            given = adapter.tensors[name].numpy()
            inside = tuple(slice(size) for size in given.shape)
            assert np.array_equal(stack[1][inside], given)
            assert np.count_nonzero(stack[1]) == np.count_nonzero(given)


def test_ranks_are_those_of_each_site_and_slot() -> None:
    made = stacks()
    made.place(0, fitted(5))
    made.place(2, fitted(16, only="v_proj"))
    assert held(made)["lora_rank"].tolist() == [[5] * 4, [0] * 4, [0, 16, 0, 16]]


def test_an_adapter_leaves_nothing_of_the_one_before_it() -> None:
    made, fresh, small = stacks(), stacks(), fitted(2, seed=7, only="v_proj")
    made.place(1, fitted(16))
    for each in (made, fresh):
        each.place(1, small)
    for (name, found), right in zip(held(made).items(), held(fresh).values(), strict=True):
        assert np.array_equal(found, right), name


def test_a_cleared_slot_is_empty_and_the_others_are_as_they_were() -> None:
    made = stacks()
    for slot in range(SLOTS):
        made.place(slot, fitted(4, seed=slot))
    before = held(made)
    made.clear(1)
    for name, found in held(made).items():
        assert not found[1].any()
        assert np.array_equal(found[[0, 2]], before[name][[0, 2]])


def test_a_view_is_the_memory_of_its_slots_and_the_same_object_every_time() -> None:
    made = stacks()
    view = made.views(1, 2)
    made.place(2, fitted(4))
    assert view[A].shape == (2, 8, 16)
    assert np.array_equal(view[A].numpy(), held(made)[A][1:])
    assert made.views(1, 2)[A] is view[A]


def test_addresses_stay_whatever_is_placed() -> None:
    made = stacks()
    before = {name: tensor.pointer for name, tensor in made.views(0, SLOTS).items()}
    made.place(0, fitted(4))
    made.clear(0)
    assert {name: t.pointer for name, t in made.views(0, SLOTS).items()} == before


def test_the_memory_is_known_before_it_is_taken() -> None:
    elements = sum(SLOTS * 16 * (site.k + site.n) for site in MANIFEST.sites)
    assert 4 * elements <= stacks_nbytes(MANIFEST) == stacks().nbytes < 4 * elements + 9 * 256


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    made = stacks()
    for ask in (made.clear, lambda slot: made.place(slot, fitted(1))):
        with pytest.raises(StateError, match=rf"^there is no slot {slot}; this engine has 0 to 2$"):
            ask(slot)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 4), (2, 2), (1, 0)])
def test_views_of_slots_that_are_not_there_are_refused(first: int, count: int) -> None:
    with pytest.raises(StateError, match="slot"):
        stacks().views(first, count)


def test_a_rank_that_is_too_large_is_refused_and_the_slot_stays() -> None:
    made, adapter = stacks(), fitted(4)
    made.place(0, adapter)
    before = held(made)
    large = Tensor(0, (8, 17), "float32", owner=None)
    tensors = {**adapter.tensors, A: large}
    with pytest.raises(AdapterError, match=rf"{A} has shape \[8, 17\], .* room for \[8, 16\]"):
        made.place(0, Fitted(tensors, adapter.coverage))
    for name, found in held(made).items():
        assert np.array_equal(found, before[name])


def test_a_tensor_of_another_engine_is_refused_by_name() -> None:
    adapter = fitted(4)
    tensors = {**adapter.tensors, "lora_A_other": adapter.tensors[A]}
    with pytest.raises(AdapterError, match="lora_A_other"):
        stacks().place(0, Fitted(tensors, adapter.coverage))


def test_an_engine_for_one_adapter_has_no_stacks() -> None:
    with pytest.raises(ConfigError, match=r"takes one adapter at a time.*--max-loras"):
        SlotStacks(make_manifest(), HostMemory())
