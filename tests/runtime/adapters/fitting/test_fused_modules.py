"""Fused and split modules onto each other: the delta of every site equals that in float64."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes.fake_engine import make_manifest, write_peft
from support.refusals import refused

from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

ATTN, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
K = 7
QKV = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
GATE_UP = {"gate_proj": 5, "up_proj": 5}
PATH = "base_model.model.{}.lora_{}.weight"


def manifest_of(*sites: Site, names: BindingNames = BindingNames.LORA) -> Manifest:
    return replace(make_manifest(names=names), sites=sites)


def fused_engine(names: BindingNames = BindingNames.LORA) -> Manifest:
    """qkv_proj and gate_up_proj of one layer."""
    return manifest_of(
        Site(f"{ATTN}qkv_proj", K, 16, "float32", (8, 4, 4)),
        Site(f"{MLP}gate_up_proj", K, 10, "float32", (5, 5)),
        names=names,
    )


def split_engine(parts: Iterable[str] = ("q_proj", "k_proj", "v_proj")) -> Manifest:
    """The named parts of the attention, gate_proj and up_proj."""
    return manifest_of(
        *(Site(f"{ATTN}{name}", K, QKV[name], "float32") for name in parts),
        *(Site(f"{MLP}{name}", K, n, "float32") for name, n in GATE_UP.items()),
    )


def pair(path: str, n: int, rank: int, k: int = K) -> dict[str, Array]:
    """A [r, k] and B [n, r] as PEFT stores them; other values for every path."""
    rng = np.random.default_rng(sum(path.encode()))
    return {
        f"{path}.lora_A": rng.standard_normal((rank, k), np.float32),
        f"{path}.lora_B": rng.standard_normal((n, rank), np.float32),
    }


def delta(tensors: Mapping[str, Array], path: str, scale: float = 1.0) -> Array:
    """[k, n] in float64, from what PEFT stores."""
    a, b = (tensors[f"{path}.lora_{factor}"].astype(np.float64) for factor in "AB")
    return scale * (b @ a).T


def fitted_delta(fitted: Fitted, path: str, names: BindingNames = BindingNames.LORA) -> Array:
    a, b = (fitted.tensors[names.binding(factor, path)].numpy() for factor in ("A", "B"))
    return a.astype(np.float64) @ b.astype(np.float64)


def assert_near(found: Array, expected: Array) -> None:
    """Equal but for the rounding of B times its scale to float32."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))


def in_memory(tensors: Mapping[str, Array]) -> Adapter:
    """An adapter of binding names; nothing has checked its ranks or shapes."""
    weights = {name: weight_of(name, tensor_from_numpy(array)) for name, array in tensors.items()}
    return Adapter("some/adapter", weights)


# ---------------------------------------------------------------------------- split onto fused


@pytest.mark.parametrize("names", BindingNames)
@pytest.mark.parametrize(
    "parts", [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj"), ("k_proj",), ("v_proj",)]
)
def test_the_parts_of_an_attention_go_onto_its_fused_linear(
    tmp_path: Path, parts: tuple[str, ...], names: BindingNames
) -> None:
    ranks, alphas = {"q_proj": 1, "k_proj": 3, "v_proj": 2}, {"q_proj": 4, "k_proj": 5, "v_proj": 1}
    tensors: dict[str, Array] = {}
    for name in parts:
        tensors |= pair(f"{ATTN}{name}", QKV[name], ranks[name])
    source = write_peft(tmp_path / "a", tensors, rank_pattern=ranks, alpha_pattern=alphas)
    fitted = fit_adapter(load_adapter(source), fused_engine(names))

    expected, starts = np.zeros((K, 16)), {"q_proj": 0, "k_proj": 8, "v_proj": 12}
    for name in parts:
        columns = slice(starts[name], starts[name] + QKV[name])
        expected[:, columns] = delta(tensors, f"{ATTN}{name}", alphas[name] / ranks[name])
    assert_near(fitted_delta(fitted, f"{ATTN}qkv_proj", names), expected)
    rank = sum(ranks[name] for name in parts)
    assert fitted.tensors[names.binding("A", f"{ATTN}qkv_proj")].shape == (K, rank)
    assert len(fitted.tensors) == 2


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj"), ("up_proj",)])
def test_gate_and_up_go_onto_their_fused_linear(tmp_path: Path, parts: tuple[str, ...]) -> None:
    tensors: dict[str, Array] = {}
    for name in parts:
        tensors |= pair(f"{MLP}{name}", 5, 2)
    source = write_peft(tmp_path / "a", tensors, lora_alpha=6)
    fitted = fit_adapter(load_adapter(source), fused_engine())
    expected, starts = np.zeros((K, 10)), {"gate_proj": 0, "up_proj": 5}
    for name in parts:
        expected[:, starts[name] : starts[name] + 5] = delta(tensors, f"{MLP}{name}", 3)
    assert_near(fitted_delta(fitted, f"{MLP}gate_up_proj"), expected)


def test_parts_of_one_dtype_and_scale_are_not_rounded(tmp_path: Path) -> None:
    tensors = pair(f"{ATTN}q_proj", 8, 2) | pair(f"{ATTN}v_proj", 4, 2)
    half = {name: array.astype(np.float16) for name, array in tensors.items()}
    fitted = fit_adapter(load_adapter(write_peft(tmp_path / "a", half)), fused_engine())
    expected = np.zeros((K, 16))
    expected[:, :8] = delta(half, f"{ATTN}q_proj")
    expected[:, 12:] = delta(half, f"{ATTN}v_proj")
    np.testing.assert_array_equal(fitted_delta(fitted, f"{ATTN}qkv_proj"), expected)
    assert {site.rounding_error for site in fitted.coverage.sites} == {0}


def test_gpt2s_fused_linear_takes_parts_by_its_own_name() -> None:
    path = "transformer.h.0.attn."
    engine = manifest_of(Site(f"{path}c_attn", K, 6, "float32", (2, 2, 2)))
    tensors = pair(f"{path}k_proj", 2, 1)
    factors = {f: tensors[f"{path}k_proj.lora_{f}"].T.copy() for f in "AB"}
    adapter = in_memory({f"lora_{f}_{path}k_proj": array for f, array in factors.items()})
    expected = np.zeros((K, 6))
    expected[:, 2:4] = delta(tensors, f"{path}k_proj")
    assert_near(fitted_delta(fit_adapter(adapter, engine), f"{path}c_attn"), expected)


def test_parts_of_other_layers_stay_in_their_layers(tmp_path: Path) -> None:
    paths = [f"model.layers.{i}.self_attn.qkv_proj" for i in (1, 11)]
    engine = manifest_of(*(Site(path, K, 16, "float32", (8, 4, 4)) for path in paths))
    tensors = pair("model.layers.11.self_attn.q_proj", 8, 2)
    fitted = fit_adapter(load_adapter(write_peft(tmp_path / "a", tensors)), engine)
    assert fitted.tensors.keys() == {f"lora_{factor}_{paths[1]}" for factor in "AB"}


# ---------------------------------------------------------------------------- fused onto split


def test_a_fused_adapter_goes_onto_the_parts(tmp_path: Path) -> None:
    tensors = pair(f"{ATTN}qkv_proj", 16, 3) | pair(f"{MLP}gate_up_proj", 10, 3)
    source = write_peft(tmp_path / "a", tensors, r=3, lora_alpha=4)
    fitted = fit_adapter(load_adapter(source), split_engine())
    qkv, gate_up = (delta(tensors, p, 4 / 3) for p in (f"{ATTN}qkv_proj", f"{MLP}gate_up_proj"))
    assert len(fitted.tensors) == 10
    for name, (start, stop) in {"q_proj": (0, 8), "k_proj": (8, 12), "v_proj": (12, 16)}.items():
        assert_near(fitted_delta(fitted, f"{ATTN}{name}"), qkv[:, start:stop])
    assert_near(fitted_delta(fitted, f"{MLP}gate_proj"), gate_up[:, :5])
    assert_near(fitted_delta(fitted, f"{MLP}up_proj"), gate_up[:, 5:])


def test_the_engines_order_of_sites_does_not_matter(tmp_path: Path) -> None:
    tensors = pair(f"{ATTN}qkv_proj", 16, 2)
    source = write_peft(tmp_path / "a", tensors)
    fitted = fit_adapter(load_adapter(source), split_engine(("v_proj", "q_proj", "k_proj")))
    assert_near(fitted_delta(fitted, f"{ATTN}k_proj"), delta(tensors, f"{ATTN}qkv_proj")[:, 8:12])


# ------------------------------------------------------------------------------------ refusals


def assert_refused(adapter: Adapter, manifest: Manifest, *messages: str) -> None:
    """Refused with the source and every one of the messages."""
    with refused(AdapterError, adapter.source, *messages):
        fit_adapter(adapter, manifest)


def test_a_fused_adapter_is_refused_where_the_engine_takes_some_parts_alone(
    tmp_path: Path,
) -> None:
    adapter = load_adapter(write_peft(tmp_path / "a", pair(f"{ATTN}qkv_proj", 16, 2)))
    reason = f"of its 3 parts the engine takes LoRA on {ATTN}q_proj, {ATTN}v_proj alone"
    assert_refused(adapter, split_engine(("q_proj", "v_proj")), reason)


def test_a_fused_adapter_of_another_width_is_refused(tmp_path: Path) -> None:
    adapter = load_adapter(write_peft(tmp_path / "a", pair(f"{ATTN}qkv_proj", 15, 2)))
    assert_refused(adapter, split_engine(), "15 columns, its parts in the engine 8 + 4 + 4")


def test_a_part_of_another_width_is_refused(tmp_path: Path) -> None:
    adapter = load_adapter(write_peft(tmp_path / "a", pair(f"{ATTN}k_proj", 8, 2)))
    assert_refused(adapter, fused_engine(), f"8 columns, its part of {ATTN}qkv_proj 4")


def test_a_part_of_another_hidden_size_is_refused(tmp_path: Path) -> None:
    adapter = load_adapter(write_peft(tmp_path / "a", pair(f"{ATTN}k_proj", 4, 2, k=9)))
    assert_refused(adapter, fused_engine(), f"A has 9 rows, {ATTN}qkv_proj takes {K}")


def test_a_part_is_refused_where_the_manifest_does_not_say_where_it_begins(tmp_path: Path) -> None:
    adapter = load_adapter(write_peft(tmp_path / "a", pair(f"{ATTN}q_proj", 8, 2)))
    engine = manifest_of(Site(f"{ATTN}qkv_proj", K, 16, "float32"))
    assert_refused(adapter, engine, f"does not say where it begins in {ATTN}qkv_proj")


def test_ranks_that_add_up_beyond_the_maximum_are_refused(tmp_path: Path) -> None:
    tensors = pair(f"{ATTN}q_proj", 8, 9) | pair(f"{ATTN}k_proj", 4, 9)
    adapter = load_adapter(write_peft(tmp_path / "a", tensors, r=9))
    assert_refused(adapter, fused_engine(), "rank 18", "1 to 16", "--max-lora-rank 18")


def test_a_fused_linear_and_one_of_its_parts_in_one_adapter_are_refused(tmp_path: Path) -> None:
    tensors = pair(f"{ATTN}qkv_proj", 16, 2) | pair(f"{ATTN}q_proj", 8, 2)
    adapter = load_adapter(write_peft(tmp_path / "a", tensors))
    for engine in (fused_engine(), split_engine()):
        assert_refused(adapter, engine, "two of its tensors are for one binding")


def test_a_part_without_its_other_factor_is_refused() -> None:
    adapter = in_memory({f"lora_A_{ATTN}q_proj": np.ones((K, 2), np.float32)})
    assert_refused(adapter, fused_engine(), f"{ATTN}q_proj has no site in this engine")


def test_two_parts_whose_wrong_ranks_make_up_for_each_other_are_refused() -> None:
    """Each pair has two ranks; A's and B's of both together have the same sum."""
    shapes = {"A": {"q_proj": (K, 2), "k_proj": (K, 3)}, "B": {"q_proj": (3, 8), "k_proj": (2, 4)}}
    tensors = {
        f"lora_{factor}_{ATTN}{name}": np.ones(shape, np.float32)
        for factor, of_part in shapes.items()
        for name, shape in of_part.items()
    }
    assert_refused(in_memory(tensors), fused_engine(), "rank")


@pytest.mark.parametrize("fused", [True, False])
def test_a_linear_that_alternates_heads_is_never_split(tmp_path: Path, fused: bool) -> None:
    path = "gpt_neox.layers.0.attention."
    parts = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    split = [Site(f"{path}{name}", K, n, "float32") for name, n in parts.items()]
    whole = Site(f"{path}query_key_value", K, 16, "float32", (8, 4, 4))
    if fused:
        tensors, engine = pair(whole.path, 16, 2), manifest_of(*split)
    else:
        tensors, engine = pair(f"{path}q_proj", 8, 2), manifest_of(whole)
    adapter = load_adapter(write_peft(tmp_path / "a", tensors))
    assert_refused(adapter, engine, "has no site in this engine")


def test_what_is_refused_can_be_left_out(tmp_path: Path) -> None:
    tensors = pair(f"{ATTN}qkv_proj", 16, 2) | pair(f"{MLP}gate_up_proj", 10, 2)
    adapter = load_adapter(write_peft(tmp_path / "a", tensors))
    fitted = fit_adapter(adapter, split_engine(("q_proj", "v_proj")), strict=False)
    assert len(fitted.tensors) == 4
    reasons = fitted.coverage.unexpected_keys
    assert reasons.keys() == {PATH.format(f"{ATTN}qkv_proj", factor) for factor in "AB"}
    assert all("of its 3 parts" in reason for reason in reasons.values())


# ------------------------------------------------------------------------------------ coverage


def test_the_coverage_of_a_fused_site_names_every_part(tmp_path: Path) -> None:
    ranks = {"k_proj": 3}
    tensors = pair(f"{ATTN}q_proj", 8, 2) | pair(f"{ATTN}k_proj", 4, 3)
    tensors[f"{ATTN}k_proj.lora_B"] = tensors[f"{ATTN}k_proj.lora_B"].astype(np.float16)
    source = write_peft(tmp_path / "a", tensors, rank_pattern=ranks, lora_alpha=6)
    coverage = fit_adapter(load_adapter(source), fused_engine()).coverage
    qkv = f"{ATTN}qkv_proj"
    for factor in "AB":
        expected = tuple(PATH.format(f"{ATTN}{name}", factor) for name in ("q_proj", "k_proj"))
        assert coverage.bindings[f"lora_{factor}_{qkv}"] == expected
        assert coverage.bindings[f"lora_{factor}_{MLP}gate_up_proj"] == ()
        for name in expected:
            assert coverage.bound[name] == (f"lora_{factor}_{qkv}",)
    assert (coverage.unexpected_keys, coverage.source) == ({}, str(source))
    (site,) = coverage.adapted
    assert (site.path, site.rank, site.dtype) == (qkv, 5, "float32")
    assert site.scales == (3, 2)  # alpha / rank of q and of k
    assert set(site.source_dtypes) == {"float32", "float16"}
    assert site.nbytes == coverage.nbytes == 4 * 5 * (K + 16)
    assert [site.rank for site in coverage.sites] == [5, 0]


def test_the_coverage_of_split_sites_names_the_fused_tensor_at_each(tmp_path: Path) -> None:
    source = write_peft(tmp_path / "a", pair(f"{ATTN}qkv_proj", 16, 2), lora_alpha=6)
    coverage = fit_adapter(load_adapter(source), split_engine()).coverage
    for factor in "AB":
        name = PATH.format(f"{ATTN}qkv_proj", factor)
        bindings = tuple(f"lora_{factor}_{ATTN}{part}" for part in QKV)
        assert coverage.bound[name] == bindings
        assert all(coverage.bindings[binding] == (name,) for binding in bindings)
    assert [(site.rank, site.scales) for site in coverage.adapted] == [(2, (3,))] * 3
