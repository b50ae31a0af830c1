"""A manager on an engine for many adapters: its active one is a slot that every row takes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.manager_setup import refreshed
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.errors import BackendError, UnknownAdapterError
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.store.slot_stacks import SlotStacks

MANIFEST = replace(make_manifest(), max_loras=4)
PATH = "model.layers.1.self_attn.v_proj"
A, B = f"lora_A_{PATH}", f"lora_B_{PATH}"


def manager(folder: Path) -> LoRAManager:
    """Bound, with an adapter of rank 3 that has all sites, and one that has PATH alone."""
    made = LoRAManager()
    made.initialize_engine_bindings(FakeExecutor(MANIFEST))
    weights = make_weights(MANIFEST, rank=3)
    save_file(weights, folder / "all.safetensors")
    save_file({name: weights[name] for name in (A, B)}, folder / "part.safetensors")
    for name in ("all", "part"):
        made.load_weights(name, folder / f"{name}.safetensors")
    return made


def test_the_base_model_is_no_slot_for_every_row(tmp_path: Path) -> None:
    bound = refreshed(manager(tmp_path))
    assert bound.keys() == MANIFEST.lora_inputs
    assert bound["lora_slot"].numpy().tolist() == [-1]
    assert bound["lora_rank"].numpy().tolist() == [[0] * 4]
    assert (bound[A].shape, bound[B].shape) == ((1, 8, 16), (1, 16, 6))
    assert not bound[A].numpy().any()


def test_a_switch_binds_the_slot_of_the_adapter_for_all_rows(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.switch_weights("part")
    bound = refreshed(made)
    assert bound["lora_slot"].numpy().tolist() == [0]
    assert bound["lora_rank"].numpy().tolist() == [[0, 0, 0, 3]]
    assert bound[A].shape == (1, 8, 16)
    assert np.array_equal(bound[A].numpy()[0, :, :3], made.get_active_weight(A).numpy())
    assert np.array_equal(bound[A].numpy()[0, :, :3], make_weights(MANIFEST, rank=3)[A])
    assert not bound[A].numpy()[0, :, 3:].any()
    assert not bound[A.replace("v_proj", "q_proj")].numpy().any()
    made.reset_weights()
    assert refreshed(made)["lora_slot"].numpy().tolist() == [-1]


@pytest.mark.parametrize("before", [None, "part"])
def test_a_switch_that_fails_on_the_device_leaves_the_adapter_before_and_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    made = manager(tmp_path)
    assert made.store is not None
    if before:
        made.switch_weights(before)

    def fails(*args: object) -> None:
        raise BackendError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(SlotStacks, "place", fails)
        with pytest.raises(BackendError, match="is lost"):
            made.switch_weights("all")
    assert made.get_active_adapter_name() == (before or "")
    assert made.store.info("all").leases == 0
    made.store.check_integrity()


def test_a_switch_back_finds_the_adapter_in_its_slot(tmp_path: Path) -> None:
    made = manager(tmp_path)
    for name in ("all", "part", "all"):
        made.switch_weights(name)
        seen = refreshed(made)
    assert made.store is not None
    assert (made.store.stats.copies, made.store.stats.in_slots) == (2, 2)
    assert np.array_equal(seen[B].numpy()[0, :3], make_weights(MANIFEST, rank=3)[B])


def test_a_strength_keeps_the_slot(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.switch_weights("all", 0.5)
    bound = refreshed(made)
    assert bound[B].shape == (1, 16, 6)
    assert np.array_equal(bound[B].numpy()[0, :3], make_weights(MANIFEST, rank=3)[B] / 2)
    assert bound["lora_slot"].numpy().tolist() == [0]


def test_ranks_of_a_blend_add_up_without_the_zeros_of_a_slot(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.blend("both", {"all": 0.5, "part": 2.0})
    made.switch_weights("both", 2.0)
    bound, given = refreshed(made), make_weights(MANIFEST, rank=3)
    assert bound["lora_rank"].numpy().tolist() == [[3, 3, 3, 6]]
    delta = bound[A].numpy()[0] @ bound[B].numpy()[0]
    np.testing.assert_allclose(delta, 5 * given[A] @ given[B], rtol=1e-5)


def test_weights_in_memory_of_any_rank_are_taken(tmp_path: Path) -> None:
    made = manager(tmp_path)
    for name, rank in (("short", 3), ("full", 16)):
        made.add_weights(name, make_weights(MANIFEST, rank=rank))
        made.switch_weights(name)
        assert refreshed(made)["lora_rank"].numpy().tolist() == [[rank] * 4]


def test_a_single_slot_is_taken_in_turns_and_a_switch_that_fails_changes_nothing(
    tmp_path: Path,
) -> None:
    made = LoRAManager()
    made.initialize_engine_bindings(FakeExecutor(replace(make_manifest(), max_loras=1)))
    for name, rank in (("a", 2), ("b", 3)):
        made.add_weights(name, make_weights(MANIFEST, rank=rank))
    for name, rank in (("a", 2), ("b", 3), ("a", 2)):
        made.switch_weights(name)
        assert refreshed(made)["lora_rank"].numpy().tolist() == [[rank] * 4]
    with pytest.raises(UnknownAdapterError):
        made.switch_weights("c")
    assert made.get_active_adapter_name() == "a"
    assert refreshed(made)["lora_rank"].numpy().tolist() == [[2] * 4]
