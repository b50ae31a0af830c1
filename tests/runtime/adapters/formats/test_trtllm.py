"""TensorRT-LLM's two files: read as its documentation lays them out, written as its converter."""

from pathlib import Path

import numpy as np
import pytest
from support.adapters.trtllm_files import (
    CONFIG,
    FUSED_QKV,
    LAYER,
    MLP,
    PARTS,
    WEIGHTS,
    Q,
    delta,
    factors,
    manifest_of,
    rows_of,
    site,
    stored,
)
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

# Document 004: four layers, hidden size 4; q of every layer, k of the first two.
EXAMPLE = [[1, 0, 2], [2, 0, 4], [1, 1, 2], [2, 1, 4], [1, 2, 2], [1, 3, 8]]


EXAMPLE_ENGINE = manifest_of(
    *(site(LAYER.format(i, name)) for i in range(4) for name in ("q_proj", "k_proj"))
)
ONE_SITE = manifest_of(site(Q, 3, 5))


def write(directory: Path, weights: Array, config: object) -> Path:
    directory.mkdir(exist_ok=True)
    np.save(directory / WEIGHTS, weights)
    np.save(directory / CONFIG, np.array(config, np.int32))
    return directory


def deltas(directory: Path, manifest: Manifest) -> dict[str, Array]:
    """A @ B of every site that the adapter reaches in an engine, in float64."""
    tensors = fit_adapter(load_adapter(directory, manifest), manifest).tensors
    return {
        site.path: tensors[a].numpy().astype(np.float64) @ tensors[b].numpy().astype(np.float64)
        for site in manifest.sites
        if (a := f"lora_A_{site.path}") in tensors and (b := f"lora_B_{site.path}") in tensors
    }


def assert_refused(directory: Path, manifest: Manifest | None, *messages: str) -> None:
    """Refused with the directory and every one of the messages."""
    with refused(AdapterError, directory, *messages):
        load_adapter(directory, manifest).in_memory()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("batched", [False, True])
def test_the_documented_example_is_read(
    tmp_path: Path, dtype: str, columns: int, batched: bool
) -> None:
    pairs = [factors(rank, seed=i) for i, (_, _, rank) in enumerate(EXAMPLE)]
    rows, config = stored(rows_of(pairs), dtype), [[*row, 0][:columns] for row in EXAMPLE]
    assert rows.shape == (6, 64)  # rank 8 fills its row, rank 2 a quarter of it
    directory = write(tmp_path / "a", *((rows[None], [config]) if batched else (rows, config)))

    adapter = load_adapter(directory, EXAMPLE_ENGINE)
    assert len(adapter.weights) == 12
    for (module, layer, rank), (a, b) in zip(EXAMPLE, pairs, strict=True):
        path = LAYER.format(layer, {1: "q_proj", 2: "k_proj"}[module])
        found = [adapter.weights[f"lora_{factor}_{path}"] for factor in "AB"]
        assert [weight.shape for weight in found] == [(4, rank), (rank, 4)]
        assert {weight.dtype for weight in found} == {dtype}
        np.testing.assert_array_equal(found[0].values(), a.T)
        np.testing.assert_array_equal(found[1].values(), b.T)


def test_the_documented_example_fits_its_engine_and_leaves_two_sites_alone(tmp_path: Path) -> None:
    pairs = [factors(rank, seed=i) for i, (_, _, rank) in enumerate(EXAMPLE)]
    found = deltas(write(tmp_path / "a", rows_of(pairs), EXAMPLE), EXAMPLE_ENGINE)
    names = {1: "q_proj", 2: "k_proj"}
    paths = [LAYER.format(layer, names[module]) for module, layer, _ in EXAMPLE]
    expected = {path: delta(*pair) for path, pair in zip(paths, pairs, strict=True)}
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        (0, "model.layers.1.self_attn.qkv_proj"),
        (0, "transformer.h.1.attn.c_attn"),
        (4, "model.layers.1.self_attn.o_proj"),
        (4, "transformer.h.1.attn.c_proj"),
        (5, "model.layers.1.mlp.gate_proj"),
        (5, "transformer.h.1.mlp.c_fc"),
        (6, "model.layers.1.mlp.down_proj"),
        (6, "transformer.h.1.mlp.c_proj"),
        (7, "model.layers.1.mlp.up_proj"),
        (9, "model.layers.1.encoder_attn.q_proj"),
        (12, "model.layers.1.encoder_attn.out_proj"),
        (13, "model.layers.1.block_sparse_moe.w1"),
        (16, "model.layers.1.block_sparse_moe.gate"),
        (17, "model.layers.1.mlp.shared_expert_gate"),
        (19, "model.layers.1.mlp.shared_expert.gate_proj"),
        (20, "model.layers.1.mlp.shared_expert.down_proj"),
        (21, "model.layers.1.mlp.shared_expert.up_proj"),
        (22, "backbone.layers.1.mixer.in_proj"),
        (23, "backbone.layers.1.mixer.out_proj"),
        (25, "model.layers.1.fc2_latent_proj"),
    ],
)
def test_a_module_id_and_a_layer_name_a_site(tmp_path: Path, module: int, path: str) -> None:
    others = [site(path.replace("1", "0"), 3, 5), site("lm_head", 3, 5)]
    a, b = factors(2, 3, 5)
    found = deltas(
        write(tmp_path / "a", rows_of([(a, b)]), [[module, 1, 2]]),
        manifest_of(*others, site(path, 3, 5)),
    )
    assert found.keys() == {path}
    np.testing.assert_array_equal(found[path], delta(a, b))


SPLIT_QKV = manifest_of(*(site(LAYER.format(0, name), 3, n) for name, n in PARTS.items()))


def test_a_fused_row_goes_onto_split_sites(tmp_path: Path) -> None:
    a, b = factors(2, 3, 10)
    found = deltas(write(tmp_path / "a", rows_of([(a, b)]), [[0, 0, 2]]), SPLIT_QKV)
    whole, starts = delta(a, b), {"q_proj": 0, "k_proj": 6, "v_proj": 8}
    assert found.keys() == {LAYER.format(0, name) for name in PARTS}
    for name, start in starts.items():
        expected = whole[:, start : start + PARTS[name]]
        np.testing.assert_array_equal(found[LAYER.format(0, name)], expected)


@pytest.mark.parametrize("modules", [(1, 2, 3), (3, 1, 2), (1, 3), (2,)])
def test_split_rows_go_onto_a_fused_site(tmp_path: Path, modules: tuple[int, ...]) -> None:
    places = {1: (0, 6), 2: (6, 8), 3: (8, 10)}
    pairs = [factors(m, 3, places[m][1] - places[m][0], seed=m) for m in modules]
    directory = write(tmp_path / "a", rows_of(pairs), [[m, 0, m] for m in modules])
    expected = np.zeros((3, 10))
    for module, pair in zip(modules, pairs, strict=True):
        expected[:, slice(*places[module])] = delta(*pair)
    np.testing.assert_array_equal(
        deltas(directory, FUSED_QKV)[LAYER.format(0, "qkv_proj")], expected
    )


def test_the_halves_of_a_fused_mlp_are_the_other_way_round_in_the_file(tmp_path: Path) -> None:
    a, b = factors(2, 3, 10)
    swapped = np.concatenate([b[5:], b[:5]])  # in the file up comes first, in transformers gate
    directory = write(tmp_path / "a", rows_of([(a, swapped)]), [[18, 0, 2]])
    fused = manifest_of(site(f"{MLP}gate_up_proj", 3, 10, (5, 5)))
    np.testing.assert_array_equal(deltas(directory, fused)[f"{MLP}gate_up_proj"], delta(a, b))
    split = manifest_of(site(f"{MLP}gate_proj", 3, 5), site(f"{MLP}up_proj", 3, 5))
    found = deltas(directory, split)
    np.testing.assert_array_equal(found[f"{MLP}gate_proj"], delta(a, b[:5]))
    np.testing.assert_array_equal(found[f"{MLP}up_proj"], delta(a, b[5:]))


def test_gate_and_up_go_onto_a_fused_mlp(tmp_path: Path) -> None:
    gate, up = factors(1, 3, 5, seed=1), factors(2, 3, 5, seed=2)
    directory = write(tmp_path / "a", rows_of([gate, up]), [[5, 0, 1], [7, 0, 2]])
    fused = manifest_of(site(f"{MLP}gate_up_proj", 3, 10, (5, 5)))
    expected = np.concatenate([delta(*gate), delta(*up)], axis=1)
    np.testing.assert_array_equal(deltas(directory, fused)[f"{MLP}gate_up_proj"], expected)


def test_without_an_engine_the_files_cannot_be_read(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", rows_of([factors(2, 3, 5)]), [[1, 0, 2]])
    assert_refused(directory, None, "holds no shapes", "--engine DIR")


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ([1, 0, 2, 1], ["row 0", "DoRA"]),
        ([26, 0, 2, 0], ["row 0", "module id 26", "0 to 25"]),
        ([-1, 0, 2, 0], ["module id -1"]),
        ([2, 0, 2, 0], ["attn_k of layer 0", "no sites"]),
        ([1, 1, 2, 0], ["attn_q of layer 1", "no sites"]),
        ([1, -1, 2, 0], ["attn_q of layer -1", "no sites"]),
        ([1, 0, 3, 0], ["rank 3 for k=3 and n=5", "takes 24 values", "has 16", "another base"]),
        ([1, 0, 0, 0], ["rank 0"]),
        ([1, 0, -2, 0], ["rank -2"]),
        ([1, 0, 2**31 - 1, 0], ["rank 2147483647"]),
    ],
)
def test_a_row_that_the_engine_cannot_take_is_refused(
    tmp_path: Path, row: list[int], messages: list[str]
) -> None:
    directory = write(tmp_path / "a", rows_of([factors(2, 3, 5)]), [row])
    assert_refused(directory, ONE_SITE, *messages)


def test_a_row_that_goes_on_after_its_rank_is_refused(tmp_path: Path) -> None:
    rows = np.zeros((1, 20), np.float32)
    rows[0, :16] = rows_of([factors(2, 3, 5)])[0]
    directory = write(tmp_path / "a", rows, [[1, 0, 2]])
    assert len(load_adapter(directory, ONE_SITE).in_memory().weights) == 2
    rows[0, 19] = 1e-30
    assert_refused(write(directory, rows, [[1, 0, 2]]), ONE_SITE, "goes on after rank 2")


def test_two_rows_for_one_site_are_refused(tmp_path: Path) -> None:
    pairs = [factors(2, 3, 5), factors(2, 3, 5, seed=1)]
    directory = write(tmp_path / "a", rows_of(pairs), [[1, 0, 2], [1, 0, 2]])
    assert_refused(directory, ONE_SITE, f"row 1 of {CONFIG} is for {Q}, and so is another row")


def test_a_fused_row_beside_one_of_its_parts_is_refused(tmp_path: Path) -> None:
    pairs = [factors(2, 3, 10), factors(2, 3, 6)]
    directory = write(tmp_path / "a", rows_of(pairs), [[0, 0, 2], [1, 0, 2]])
    with pytest.raises(AdapterError, match="two of its tensors are for one binding"):
        fit_adapter(load_adapter(directory, FUSED_QKV), FUSED_QKV)


def test_a_row_for_one_of_several_experts_is_refused(tmp_path: Path) -> None:
    experts = manifest_of(*(site(f"model.layers.0.moe.experts.{i}.w1", 3, 5) for i in (0, 1)))
    directory = write(tmp_path / "a", rows_of([factors(2, 3, 5)]), [[13, 0, 2]])
    assert_refused(directory, experts, "moe_h_to_4h of layer 0", "2 sites")


def test_a_fused_row_is_refused_where_its_parts_are_of_two_modules(tmp_path: Path) -> None:
    paths = {LAYER.format(0, "q_proj"): 6, LAYER.format(0, "k_proj"): 2, "model.layers.0.v_proj": 2}
    directory = write(tmp_path / "a", rows_of([factors(2, 3, 10)]), [[0, 0, 2]])
    apart = manifest_of(*(site(path, 3, n) for path, n in paths.items()))
    assert_refused(directory, apart, "attn_qkv of layer 0", "no sites")


def test_a_fused_row_for_a_linear_that_alternates_heads_is_refused(tmp_path: Path) -> None:
    path = "gpt_neox.layers.0.attention.query_key_value"
    directory = write(tmp_path / "a", rows_of([factors(2, 3, 9)]), [[0, 0, 2]])
    assert_refused(directory, manifest_of(site(path, 3, 9)), "heads")


@pytest.mark.parametrize(
    ("weights", "config"),
    [
        ((16,), (1, 3)),
        ((1, 16), (3,)),
        ((2, 1, 16), (1, 3)),
        ((1, 1, 1, 16), (1, 3)),
        ((1, 16), (1, 2)),
        ((1, 16), (1, 5)),
        ((1, 16), (2, 1, 3)),
        ((), (1, 3)),
        ((1, 16), ()),
    ],
)
def test_a_wrong_number_of_dimensions_is_refused(
    tmp_path: Path, weights: tuple[int, ...], config: tuple[int, ...]
) -> None:
    directory = write(tmp_path / "a", np.ones(weights, np.float32), np.ones(config))
    assert_refused(directory, ONE_SITE, f"{CONFIG} has shape", "expected [rows, 3 or 4]")


@pytest.mark.parametrize("rows", [(2, 1), (1, 2), (0, 0)])
def test_a_row_of_one_file_without_a_row_of_the_other_is_refused(
    tmp_path: Path, rows: tuple[int, int]
) -> None:
    directory = write(tmp_path / "a", np.ones((rows[0], 16), np.float32), [[1, 0, 2]] * rows[1])
    if not rows[1]:
        np.save(directory / CONFIG, np.zeros((0, 3), np.int32))
    assert_refused(directory, ONE_SITE, f"{rows[1]} rows of config, {rows[0]} of weights")


def valid(directory: Path) -> Path:
    return write(directory, rows_of([factors(2, 3, 5)]), [[1, 0, 2]])


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_bytes_after_the_array_are_refused(tmp_path: Path, name: str) -> None:
    path = valid(tmp_path / "a") / name
    path.write_bytes(path.read_bytes() + b"\0")
    assert_refused(path.parent, ONE_SITE, name, "bytes, which is not what its shape")


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    (valid(tmp_path / "a") / name).unlink()
    assert_refused(tmp_path / "a", ONE_SITE, "adapter_config" if name == WEIGHTS else name)


def test_an_array_in_column_order_is_refused(tmp_path: Path) -> None:
    pairs = [factors(2, 3, 5), factors(2, 3, 5, seed=1)]
    engine = manifest_of(site(Q, 3, 5), site(LAYER.format(1, "q_proj"), 3, 5))
    config = [[1, 0, 2], [1, 1, 2]]
    directory = write(tmp_path / "a", np.asfortranarray(rows_of(pairs)), config)
    assert_refused(directory, engine, WEIGHTS, "column order")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ">f4", "V4", np.int32])
def test_weights_of_another_dtype_are_refused(tmp_path: Path, dtype: str) -> None:
    directory = valid(tmp_path / "a")
    np.save(directory / WEIGHTS, np.zeros((1, 16), dtype))
    assert_refused(directory, ONE_SITE, WEIGHTS)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, ">i4"])
def test_a_config_of_another_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    directory = valid(tmp_path / "a")
    np.save(directory / CONFIG, np.array([[1, 0, 2]], dtype))
    assert_refused(directory, ONE_SITE, CONFIG)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    directory = valid(tmp_path / "a")
    rows = np.load(directory / WEIGHTS)
    rows[0, 15] = value
    np.save(directory / WEIGHTS, rows)
    assert_refused(directory, ONE_SITE, f"{WEIGHTS}[0].B", "NaN or infinity")
