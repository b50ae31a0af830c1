"""A manager on an engine for many adapters: its active one is a slot that every row takes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.manager_setup import refreshed
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.managers.lora_manager import LoRAManager

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


def test_a_switch_binds_the_adapter_as_a_slot_where_it_lies(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.switch_weights("part")
    bound = refreshed(made)
    assert bound["lora_slot"].numpy().tolist() == [0]
    assert bound["lora_rank"].numpy().tolist() == [[0, 0, 0, 3]]
    assert bound[A].shape == (1, 8, 16)
    assert bound[A].pointer == made.get_active_weight(A).pointer
    assert np.array_equal(bound[A].numpy()[0, :, :3], make_weights(MANIFEST, rank=3)[A])
    assert not bound[A].numpy()[0, :, 3:].any()
    assert not bound[A.replace("v_proj", "q_proj")].numpy().any()
    made.reset_weights()
    assert refreshed(made)["lora_slot"].numpy().tolist() == [-1]


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


def test_weights_in_memory_must_fill_a_slot(tmp_path: Path) -> None:
    made = manager(tmp_path)
    weights = make_weights(MANIFEST, rank=3)
    with pytest.raises(AdapterError, match=r"has shape \[8, 3\], but a slot .* is \[8, 16\]"):
        made.add_weights("short", weights)
    made.add_weights("full", make_weights(MANIFEST, rank=16))
    made.switch_weights("full")
    assert refreshed(made)["lora_rank"].numpy().tolist() == [[16] * 4]
