"""Named adapters and their slots: who has one, who leaves, and what a step binds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fakes.adapter_files import stacks_of
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.runtime.store.store import AdapterStore

SLOTS = 2
MANIFEST = replace(make_manifest(), max_loras=SLOTS)
A = "lora_A_model.layers.0.self_attn.q_proj"


def file_of(name: str, folder: Path) -> Path:
    """An adapter whose rank and values depend on its name."""
    seed = ord(name)
    path = folder / f"{name}.safetensors"
    save_file(make_weights(MANIFEST, rank=seed % 16 + 1, seed=seed), path)
    return path


def loaded(folder: Path, names: str = "abc") -> AdapterStore:
    adapters = AdapterStore(FakeExecutor(MANIFEST))
    for name in names:
        adapters.load(name, file_of(name, folder))
    return adapters


def lies_in(adapters: AdapterStore, name: str, slot: int) -> bool:
    """Whether a slot holds what the file of that name does."""
    stack = stacks_of(adapters).views(slot, 1)[A].numpy()[0]
    given = make_weights(MANIFEST, rank=ord(name) % 16 + 1, seed=ord(name))[A]
    return np.array_equal(stack[:, : given.shape[1]], given)


def test_an_adapter_takes_a_slot_when_a_row_wants_it_and_keeps_it(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    assert adapters.bindings.slots == {}
    assert [adapters.bindings.activate(name) for name in "bab"] == [0, 1, 0]
    assert lies_in(adapters, "b", 0)
    assert lies_in(adapters, "a", 1)
    adapters.check_integrity()


def test_the_least_recently_used_leaves(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    for name in "aba":
        adapters.bindings.activate(name)
    assert adapters.bindings.activate("c") == 1
    assert adapters.bindings.slots.keys() == {"a", "c"}
    assert lies_in(adapters, "c", 1)
    adapters.check_integrity()


def test_what_is_leased_does_not_leave(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    lease = adapters.lease("a")
    for name in "ab":
        adapters.bindings.activate(name)
    assert adapters.bindings.activate("c") == 1
    other = adapters.lease("c")
    with pytest.raises(StateError, match=r"2 slots in use by 'a' \(1 sequence\), 'c' \(1"):
        adapters.bindings.activate("b")
    assert adapters.bindings.slots == {"a": 0, "c": 1}
    adapters.release(lease)
    assert adapters.bindings.activate("b") == 0
    adapters.release(other)
    adapters.check_integrity()


def test_a_lease_is_exchanged_where_all_slots_are_held(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    first, second = adapters.lease("a"), adapters.lease("b")
    adapters.bindings.rows([first, second])
    with pytest.raises(StateError, match="2 slots in use"):
        adapters.exchange(None, "c")
    third = adapters.exchange(first, "c")
    assert adapters.bindings.activate(third) == 0
    with pytest.raises(StateError, match="released already"):
        adapters.exchange(first, "a")
    with pytest.raises(UnknownAdapterError):
        adapters.exchange(second, "nobody")
    again = adapters.lease("b")  # two leases hold it: one is not enough for another adapter
    with pytest.raises(StateError, match="2 slots in use"):
        adapters.exchange(second, "a")
    for lease in (second, third, again):
        adapters.release(lease)
    adapters.check_integrity()


def test_a_lease_is_kept_where_another_adapter_cannot_be_read(tmp_path: Path) -> None:
    adapters = loaded(tmp_path, "a")
    adapters.register("b", file_of("b", tmp_path))
    lease = adapters.lease("a")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"b\.safetensors"):
        adapters.exchange(lease, "b")
    adapters.release(lease)
    adapters.check_integrity()


def test_a_step_binds_the_slots_of_its_rows_and_counts_from_the_first(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    both = adapters.bindings.rows(["a", None, "b", "a"])
    assert both["lora_slot"].numpy().tolist() == [0, -1, 1, 0]
    assert both[A].shape == (2, 8, 16)
    one = adapters.bindings.rows([None, "b"])
    assert one["lora_slot"].numpy().tolist() == [-1, 0]
    assert one["lora_rank"].numpy().tolist() == [[ord("b") % 16 + 1] * 4]
    assert np.array_equal(one[A].numpy()[0], both[A].numpy()[1])
    assert both.keys() == MANIFEST.lora_inputs


def test_a_step_may_bind_every_slot(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    adapters.bindings.rows(["a", "b"])
    step = adapters.bindings.rows([None, "b"], all_slots=True)
    assert step["lora_slot"].numpy().tolist() == [-1, 1]
    assert step[A].shape == (2, 8, 16)


def test_a_step_of_base_rows_needs_no_adapter(tmp_path: Path) -> None:
    base = AdapterStore(FakeExecutor(MANIFEST)).bindings.rows([None, None])
    assert base["lora_slot"].numpy().tolist() == [-1, -1]
    assert base[A].shape == (1, 8, 16)


def test_no_adapter_of_a_step_takes_the_slot_of_another(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    adapters.bindings.rows(["a", "b"])
    step = adapters.bindings.rows(["c", "a"])  # b leaves, though a was used before it
    assert adapters.bindings.slots == {"a": 0, "c": 1}
    assert step["lora_slot"].numpy().tolist() == [1, 0]


def test_more_adapters_than_slots_are_refused_and_nothing_moves(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    adapters.bindings.rows(["a", "b"])
    with pytest.raises(StateError, match=r"3 adapters in one step .* 2 slots; split the rows"):
        adapters.bindings.rows(["a", "b", "c"])
    assert adapters.bindings.slots == {"a": 0, "b": 1}


def test_an_unknown_adapter_is_refused_before_anything_moves(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    with pytest.raises(UnknownAdapterError, match="unknown adapter 'x'; loaded: a, b, c"):
        adapters.bindings.rows(["a", "x"])
    assert adapters.bindings.slots == {}


def test_an_unloaded_adapter_frees_its_slot_and_its_name(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    adapters.bindings.rows(["a", "b"])
    adapters.unload("a")
    assert not stacks_of(adapters).views(0, 1)[A].numpy().any()
    assert adapters.bindings.activate("c") == 0
    assert adapters.names == ("b", "c")
    adapters.load("a", file_of("a", tmp_path))
    adapters.check_integrity()
    with pytest.raises(UnknownAdapterError):
        adapters.unload("x")


def test_a_name_that_is_taken_or_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    adapters = loaded(tmp_path)
    with pytest.raises(AdapterError, match="'a' is loaded already; choose another name"):
        adapters.load("a", file_of("b", tmp_path))
    save_file(make_weights(MANIFEST, rank=17), tmp_path / "large.safetensors")
    with pytest.raises(AdapterError, match="has rank 17; this engine takes 1 to 16"):
        adapters.load("d", tmp_path / "large.safetensors")
    assert adapters.names == ("a", "b", "c")
