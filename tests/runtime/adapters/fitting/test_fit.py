"""An adapter fitted to an engine: every tensor bound, or the adapter refused by name."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.fakes.fake_engine import make_manifest, make_weights
from support.refusals import refused

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy, tensor_from_storage

MANIFEST = make_manifest()
SITE = "model.layers.0.self_attn.q_proj"
A, B = f"lora_A_{SITE}", f"lora_B_{SITE}"


def adapter(weights: Mapping[str, Array], *, owned: bool = True) -> Adapter:
    tensors = {name: tensor_from_numpy(array) for name, array in weights.items()}
    return of_tensors(tensors, owned=owned)


def of_tensors(tensors: Mapping[str, Tensor], *, owned: bool = True) -> Adapter:
    weights = {name: weight_of(name, tensor) for name, tensor in tensors.items()}
    return Adapter("some/adapter", weights, owned=owned)


def tensors_of(adapter: Adapter, manifest: Manifest) -> Mapping[str, Tensor]:
    return fit_adapter(adapter, manifest).tensors


def pair(a: tuple[int, ...] = (8, 2), b: tuple[int, ...] = (2, 6)) -> dict[str, Array]:
    return {A: np.ones(a, np.float32), B: np.ones(b, np.float32)}


def assert_refused(weights: Mapping[str, Array], *messages: str) -> None:
    """Refused with the source and every one of the messages."""
    with refused(AdapterError, "some/adapter: ", *messages):
        fit_adapter(adapter(weights), MANIFEST)


# -------------------------------------------------------------------------------------- bindings


def test_an_adapter_for_every_site_is_bound_in_place() -> None:
    source = adapter(make_weights(MANIFEST))
    fitted = tensors_of(source, MANIFEST)
    assert fitted == {n: w.tensor for n, w in source.weights.items()}  # compares by identity
    assert fitted.keys() == MANIFEST.lora_bindings.keys()


def test_an_adapter_for_some_sites_binds_only_those() -> None:
    assert tensors_of(adapter(pair()), MANIFEST).keys() == {A, B}


def test_the_rank_may_differ_by_site() -> None:
    other = {name.replace("q_proj", "v_proj"): t for name, t in pair((8, 16), (16, 6)).items()}
    fitted = tensors_of(adapter({**pair((8, 1), (1, 6)), **other}), MANIFEST)
    assert sorted(t.shape for t in fitted.values()) == [(1, 6), (8, 1), (8, 16), (16, 6)]


@pytest.mark.parametrize("adapter_names", BindingNames)
@pytest.mark.parametrize("engine_names", BindingNames)
def test_either_spelling_is_bound_under_the_engines_names(
    adapter_names: BindingNames, engine_names: BindingNames
) -> None:
    weights = make_weights(make_manifest(names=adapter_names))
    engine = make_manifest(names=engine_names)
    fitted = tensors_of(adapter(weights), engine)
    assert fitted.keys() == engine.lora_bindings.keys()
    for (_, found), (_, expected) in zip(fitted.items(), weights.items(), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


def test_a_binding_in_both_spellings_is_refused() -> None:
    assert_refused({**pair(), f"{SITE}.lora_A.weight": pair()[A]}, "two of its tensors are for one")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lora_A_model.layers.0.mlp.up_proj", "module model.layers.0.mlp.up_proj has no site"),
        ("model.layers.2.self_attn.q_proj.lora_B.weight", "module model.layers.2.self_attn.q_proj"),
        ("logits", "'logits' is no binding of this engine"),
        ("", "'' is no binding of this engine"),
    ],
)
def test_a_tensor_without_a_site_is_refused_with_what_the_engine_takes(
    name: str, what: str
) -> None:
    choices = "takes LoRA on q_proj, v_proj of tiny (4 sites)"
    assert_refused({**pair(), name: pair()[A]}, what, choices, "--lora-dir some/adapter")


def test_a_missing_partner_is_refused_by_its_name() -> None:
    assert_refused({A: pair()[A]}, f"{B} is missing from its pair")
    assert_refused({B: pair()[B]}, f"{A} is missing from its pair")


# ------------------------------------------------------------------------------ shapes and ranks


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (pair(a=(9, 2)), f"{A} has shape [9, 2], expected [k, r] with k=8 and n=6"),
        (pair(b=(2, 7)), f"{B} has shape [2, 7], expected [r, n] with k=8 and n=6"),
        (pair(a=(2, 8)), f"{A} has shape [2, 8], expected [k, r]"),
        (pair(b=(6, 2)), f"{B} has shape [6, 2], expected [r, n]"),
        (pair(a=(6, 2), b=(2, 8)), "factors are transposed"),
        (pair(a=(16,)), f"{A} has shape [16], expected a matrix"),
        (pair(a=()), f"{A} has shape [], expected a matrix"),
        (pair(b=(1, 2, 6)), f"{B} has shape [1, 2, 6], expected a matrix"),
    ],
)
def test_a_shape_of_another_base_model_is_refused(weights: dict[str, Array], message: str) -> None:
    assert_refused(weights, message)


def test_a_transposed_factor_is_refused_even_where_the_other_one_fits() -> None:
    assert_refused(pair(a=(8, 6), b=(6, 8)), B)


@pytest.mark.parametrize(("rank", "hint"), [(17, "--max-lora-rank 17"), (512, "rank 512"), (0, "")])
def test_a_rank_that_the_engine_does_not_take_is_refused(rank: int, hint: str) -> None:
    weights = pair((8, rank), (rank, 6))
    assert_refused(weights, f"{A} has rank {rank}; this engine takes 1 to 16", hint)


def test_no_engine_is_proposed_for_a_rank_of_zero() -> None:
    with pytest.raises(AdapterError) as caught:
        fit_adapter(adapter(pair((8, 0), (0, 6))), MANIFEST)
    assert "--max-lora-rank 0" not in str(caught.value)


@pytest.mark.parametrize("rank", [1, 16])
def test_the_smallest_and_the_largest_rank_are_taken(rank: int) -> None:
    assert len(tensors_of(adapter(pair((8, rank), (rank, 6))), MANIFEST)) == 2


def test_two_ranks_in_one_pair_are_refused() -> None:
    assert_refused(pair((8, 2), (3, 6)), f"{A} has rank 2 but {B} has rank 3")


# ---------------------------------------------------------------------------------------- dtypes


def fitted_to(dtype: str, value: float, source: str = "float32") -> Tensor:
    """A of an adapter with one value everywhere, given in `source`, on an engine of `dtype`."""
    if source == "bfloat16":
        bits = int(np.float32(value).view(np.uint32)) >> 16
        tensors = {n: tensor_from_storage(np.full(w.shape, bits, np.uint16), source) for n, w in pair().items()}  # fmt: skip  # noqa: E501
    else:
        tensors = {n: tensor_from_numpy(np.full(w.shape, value, source)) for n, w in pair().items()}
    return tensors_of(of_tensors(tensors), make_manifest(dtype=dtype))[A]


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_loaded_adapter_is_cast_to_the_dtype_of_the_engine(source: str, dtype: str) -> None:
    tensor = fitted_to(dtype, 1.5, source)
    assert (tensor.dtype, tensor.shape) == (dtype, (8, 2))
    np.testing.assert_array_equal(tensor.numpy(), np.full((8, 2), 1.5))


def test_a_cast_rounds_to_nearest() -> None:
    assert fitted_to("bfloat16", 1.0 + 3 / 512).numpy()[0, 0] == 1.0078125
    assert fitted_to("float16", 1.0 + 3 / 4096).numpy()[0, 0] == np.float16(1.0 + 1 / 1024)


@pytest.mark.parametrize(
    ("dtype", "value", "source"),
    [
        ("float16", 65520.0, "float32"),
        ("float16", -1e30, "float32"),
        ("float16", 1e5, "bfloat16"),
        ("bfloat16", 3.4e38, "float32"),
    ],
)
def test_a_value_beyond_the_range_of_the_engine_is_refused(
    dtype: str, value: float, source: str
) -> None:
    with pytest.raises(AdapterError, match=rf"{A} has a value of .*the range .* {dtype}"):
        fitted_to(dtype, value, source)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65504.0), ("bfloat16", 3.38e38)])
def test_the_largest_values_of_the_engine_are_taken(dtype: str, value: float) -> None:
    assert fitted_to(dtype, value).numpy()[0, 0] == pytest.approx(value, rel=1e-2)


def test_memory_of_another_library_is_never_cast() -> None:
    with pytest.raises(AdapterError, match="taken in place and never copied"):
        fit_adapter(adapter(pair(), owned=False), make_manifest(dtype="float16"))


def test_weights_that_are_no_floats_are_refused() -> None:
    integers = {name: array.astype(np.int64) for name, array in pair().items()}
    with pytest.raises(AdapterError, match="is int64, this engine takes float32"):
        fit_adapter(adapter(integers, owned=False), MANIFEST)


@pytest.mark.parametrize("owned", [True, False])
def test_an_adapter_is_not_changed_by_the_fit(owned: bool) -> None:
    weights = make_weights(MANIFEST)
    before = {name: array.copy() for name, array in weights.items()}
    fit_adapter(adapter(weights, owned=owned), MANIFEST)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, before[name])


def test_every_site_of_an_engine_may_have_a_dtype_of_its_own() -> None:
    sites = make_manifest().sites[:1] + make_manifest(dtype="float16").sites[1:]
    mixed = Manifest(**{**vars(make_manifest()), "sites": sites})
    fitted = tensors_of(adapter(make_weights(MANIFEST)), mixed)
    assert {name: t.dtype for name, t in fitted.items()} == {
        name: site.dtype for name, (site, _) in mixed.lora_bindings.items()
    }


def test_the_report_of_an_adapter_read_before_the_engine_was_known_has_its_scale() -> None:
    source = adapter(pair())
    scaled = replace(source, weights=dict(source.weights) | {B: source.weights[B].times(2.5)})
    coverage = fit_adapter(scaled.in_memory(), MANIFEST).coverage
    assert [site.scales for site in coverage.adapted] == [(2.5,)]
    assert coverage.bound == {A: (A,), B: (B,)}


# ----------------------------------------------------------------------------------- padded ranks


def wide_manifest(max_rank: int = 64) -> Manifest:
    return replace(MANIFEST, max_lora_rank=max_rank)


@pytest.mark.parametrize(("rank", "expected"), [(1, 8), (3, 8), (8, 8), (12, 16), (17, 24)])
def test_ranks_are_padded_with_zeros_where_the_executor_wants_it(rank: int, expected: int) -> None:
    weights = pair((8, rank), (rank, 6))
    fitted = fit_adapter(adapter(weights), wide_manifest(), rank_multiple=8)
    a, b = fitted.tensors[A].numpy(), fitted.tensors[B].numpy()
    assert (a.shape, b.shape) == ((8, expected), (expected, 6))
    np.testing.assert_array_equal(a[:, :rank], weights[A])
    np.testing.assert_array_equal(b[:rank], weights[B])
    assert not a[:, rank:].any()
    assert not b[rank:].any()
    assert [site.rank for site in fitted.coverage.adapted] == [rank]


def test_ranks_stay_as_they_are_where_it_does_not_whatever_its_plan_has() -> None:
    plan = replace(MANIFEST, lora_plugin="plugin")
    tensors = fit_adapter(adapter(pair((8, 3), (3, 6))), plan).tensors
    assert tensors[A].shape == (8, 3)


def test_padding_does_not_exceed_the_engines_rank() -> None:
    source = adapter(pair((8, 9), (9, 6)))
    tensors = fit_adapter(source, wide_manifest(max_rank=12), rank_multiple=8).tensors
    assert (tensors[A].shape, tensors[B].shape) == ((8, 12), (12, 6))


def test_what_is_taken_in_place_is_not_padded() -> None:
    source = adapter(pair((8, 3), (3, 6)), owned=False)
    tensors = fit_adapter(source, wide_manifest(), rank_multiple=8).tensors
    assert tensors[A] is source.weights[A].tensor
