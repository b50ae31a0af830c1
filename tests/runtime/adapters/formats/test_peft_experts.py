"""Parameters of all experts in PEFT's files: every layout is one adapter, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.adapters.expert_files import (
    PATH,
    RANK,
    SIZES,
    TARGETS,
    E,
    H,
    deltas,
    expert_manifest,
    expert_pairs,
    flat,
    solid,
    swapped,
    write_experts,
    write_wrappers,
)
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.memory.dtypes import Array

GATE_UP, DOWN = SIZES
Layout = Callable[[tuple[Array, Array]], tuple[Array, Array]]


def found(adapter: Adapter, experts: int = E) -> dict[str, Array]:
    """A @ B of every expert of every site, as an engine would bind it."""
    tensors = fit_adapter(adapter, expert_manifest(experts=experts)).tensors
    paths = {name.removeprefix("lora_A_") for name in tensors if name.startswith("lora_A_")}
    values = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}
    return {path: values[f"lora_A_{path}"] @ values[f"lora_B_{path}"] for path in paths}


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        np.allclose(one[path], other[path], atol=1e-5) for path in one
    )


@pytest.mark.parametrize("layout", [flat, swapped, solid])
@pytest.mark.parametrize("is_turned", [False, True])
def test_two_parameters_are_told_by_their_shapes(
    layout: Layout, is_turned: bool, tmp_path: Path
) -> None:
    pairs = expert_pairs()
    wrappers = [layout(pairs[name]) for name in (GATE_UP, DOWN)]
    folder = write_wrappers(tmp_path, *wrappers[:: -1 if is_turned else 1], peft_version=None)
    assert same(found(load_adapter(folder)), deltas(pairs))


@pytest.mark.parametrize(
    ("release", "layout"), [("0.18.1", swapped), ("0.19.0", swapped), ("0.20.0", flat)]
)
@pytest.mark.parametrize("name", SIZES)
def test_one_parameter_lies_as_its_release_of_peft_has_it(
    name: str, release: str, layout: Layout, tmp_path: Path
) -> None:
    a, b = layout(expert_pairs(name)[name])
    tensors = {f"{PATH}.lora_A": a, f"{PATH}.lora_B": b}
    folder = write_experts(
        tmp_path, tensors, peft_version=release, target_parameters=[f"experts.{name}"]
    )
    assert same(found(load_adapter(folder)), deltas(expert_pairs(name)))


def test_b_read_expert_by_expert_is_another_adapter(tmp_path: Path) -> None:
    pairs = expert_pairs()
    a, b = flat(pairs[GATE_UP])
    wrong = b.reshape(-1, RANK, E).swapaxes(1, 2).reshape(b.shape)
    folder = write_wrappers(tmp_path, (a, wrong), flat(pairs[DOWN]))
    assert not same(found(load_adapter(folder)), deltas(pairs))


@pytest.mark.parametrize("names", [tuple(SIZES), (DOWN,)])
def test_what_is_written_is_what_was_read(names: tuple[str, ...], tmp_path: Path) -> None:
    pairs = expert_pairs(*names)
    stored = [flat(pairs[name]) for name in names]
    targets = [f"mlp.experts.{name}" for name in names]
    if len(names) == 2:
        folder = write_wrappers(tmp_path / "in", *stored)
    else:
        tensors = {f"{PATH}.lora_A": stored[0][0], f"{PATH}.lora_B": stored[0][1]}
        folder = write_experts(tmp_path / "in", tensors, target_parameters=targets)
    save_adapter(load_adapter(folder), tmp_path / "out", "peft")
    before, after = (load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert same(found(load_adapter(tmp_path / "out")), deltas(pairs))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_parameters"] == sorted(f"{PATH}.{name}" for name in names)
    assert config["target_modules"] == []


def test_a_rank_of_one_parameter_is_found_by_its_name(tmp_path: Path) -> None:
    pairs = expert_pairs(GATE_UP) | expert_pairs(DOWN, rank=4)
    patterns = {"rank_pattern": {"experts.down_proj": 4}, "alpha_pattern": {"down_proj": 8}}
    folder = write_wrappers(tmp_path, flat(pairs[GATE_UP]), flat(pairs[DOWN]), **patterns)
    adapter = load_adapter(folder)
    assert adapter.ranks == {f"{PATH}.{GATE_UP}": RANK, f"{PATH}.{DOWN}": 4}
    expected = deltas(expert_pairs(GATE_UP)) | deltas({DOWN: pairs[DOWN]}, scale=2)
    assert same(found(adapter), expected)


# ----------------------------------------------------------------------------------------- refused


def test_a_parameter_by_itself_needs_the_release_of_peft(tmp_path: Path) -> None:
    a, b = flat(expert_pairs()[DOWN])
    tensors = {f"{PATH}.lora_A": a, f"{PATH}.lora_B": b}
    folder = write_experts(
        tmp_path, tensors, peft_version=None, target_parameters=["experts.down_proj"]
    )
    with refused(AdapterError, tmp_path, f"{PATH}.lora_A.weight lies over", "no peft_version"):
        load_adapter(folder)


def test_rows_that_are_no_multiple_of_the_rank_are_refused(tmp_path: Path) -> None:
    (a, b), outer = flat(expert_pairs()[GATE_UP]), flat(expert_pairs()[DOWN])
    with refused(AdapterError, "base_layer.lora_A.weight has shape [5, 5]", "times rank 2"):
        load_adapter(write_wrappers(tmp_path, (a[:-1], b), outer))


def test_a_and_b_of_other_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    (a, b), outer = flat(expert_pairs()[GATE_UP]), flat(expert_pairs()[DOWN])
    with refused(AdapterError, "lora_A.weight is of 2 experts", "lora_B.weight of 3"):
        load_adapter(write_wrappers(tmp_path, (a[:-RANK], b), outer))


def test_a_factor_without_the_other_is_refused(tmp_path: Path) -> None:
    a, _ = flat(expert_pairs()[DOWN])
    with refused(AdapterError, f"{PATH}.lora_A.weight has no lora_B beside it"):
        load_adapter(write_experts(tmp_path, {f"{PATH}.lora_A": a}))


def test_target_parameters_and_tensors_have_to_agree(tmp_path: Path) -> None:
    a, b = flat(expert_pairs()[DOWN])
    tensors = {f"{PATH}.lora_A": a, f"{PATH}.lora_B": b}
    with refused(AdapterError, "1 parameters", "gate_up_proj, down_proj"):
        load_adapter(write_experts(tmp_path, tensors))
    nothing = [TARGETS[1], "mlp.other.gate_up_proj"]
    with refused(AdapterError, "names 'mlp.other.gate_up_proj', of which its file has no tensors"):
        load_adapter(write_experts(tmp_path, tensors, target_parameters=nothing))


def test_shapes_of_no_experts_are_refused(tmp_path: Path) -> None:
    outer = np.ones((E * RANK, H), np.float32), np.ones((H, RANK * E), np.float32)
    with refused(AdapterError, "cannot be told", "[5, 8] and [5, 5]"):
        load_adapter(write_wrappers(tmp_path, flat(expert_pairs()[GATE_UP]), outer))
