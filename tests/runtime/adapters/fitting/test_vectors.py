"""Vectors of an adapter on an engine: bound, computed of DoRA's magnitudes, or refused by name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes.fake_engine import make_manifest
from support.refusals import refused

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import blend_adapters
from trt_lora.runtime.adapters.fitting.dora import with_scales
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter, preview_adapter
from trt_lora.runtime.adapters.shard import shard_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.files.stored_matrix import StoredMatrix
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE, Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

K, N, R = 8, 6, 2
PLAIN = make_manifest(k=K, n=N)
SITE = PLAIN.sites[0].path
RNG = np.random.default_rng(0)
W, A_VALUES, B_VALUES = (
    RNG.standard_normal(s).astype(np.float32) for s in ((K, N), (K, R), (R, N))
)
NAMES = {kind: f"lora_{kind}_{SITE}" for kind in ("A", "B", "scale", "bias", "magnitude")}
PAIR = {"A": A_VALUES, "B": B_VALUES}
MAGNITUDES = np.linspace(0.5, 2, N, dtype=np.float32)


def adapter(**weights: Array) -> Adapter:
    named = {NAMES.get(kind, kind): array for kind, array in (PAIR | weights).items()}
    return of(named)


def of(weights: Mapping[str, Array]) -> Adapter:
    tensors = {n: weight_of(n, tensor_from_numpy(array)) for n, array in weights.items()}
    return Adapter("some/adapter", tensors)


def engine(folder: Path, *, is_turned: bool = False, dtype: str = "float32") -> Manifest:
    """An engine with vectors whose first site has the weight W, behind 12 bytes of others."""
    values = (W.T if is_turned else W).astype(dtype)
    (folder / ONNX_WEIGHTS_FILE).write_bytes(bytes(12) + values.tobytes())
    matrices = {SITE: StoredMatrix(12, dtype, K, N, is_turned)}
    return replace(PLAIN, lora_vectors=True, matrices=matrices)


VECTORS = replace(PLAIN, lora_vectors=True)


def norms(w: Array = W) -> Array:
    delta = A_VALUES.astype(np.float64) @ B_VALUES.astype(np.float64)
    return np.asarray(np.linalg.norm(w.astype(np.float64) + delta, axis=0))


def scale_of(fitted: Fitted) -> Array:
    return fitted.tensors[NAMES["scale"]].numpy()


# ------------------------------------------------------------------------------------------ taken


def test_vectors_are_bound_and_told() -> None:
    bias = np.arange(N, dtype=np.float32)
    fitted = fit_adapter(adapter(scale=MAGNITUDES, bias=bias), VECTORS)
    assert fitted.tensors.keys() == {NAMES[k] for k in ("A", "B", "scale", "bias")}
    np.testing.assert_array_equal(fitted.tensors[NAMES["bias"]].numpy(), bias)
    first, *others = fitted.coverage.sites
    assert first.vectors == ("scale", "bias")
    assert first.nbytes == 4 * (K * R + R * N + 2 * N)
    assert not any(site.vectors for site in others)
    assert fitted.coverage.bindings[NAMES["bias"]] == (NAMES["bias"],)


def test_a_vector_is_cast_as_a_factor_is() -> None:
    half = replace(VECTORS, sites=tuple(replace(s, dtype="float16") for s in PLAIN.sites))
    fitted = fit_adapter(adapter(bias=np.full(N, 1 / 3, np.float32)), half)
    assert fitted.tensors[NAMES["bias"]].dtype == "float16"
    assert 0 < fitted.coverage.sites[0].rounding_error < 1e-3


@pytest.mark.parametrize("names", BindingNames)
def test_either_spelling_is_known(names: BindingNames) -> None:
    weights = {names.binding("bias", SITE): np.ones(N, np.float32)}
    weights |= dict(zip(names.pair(SITE), PAIR.values(), strict=True))
    assert NAMES["bias"] in fit_adapter(of(weights), VECTORS).tensors


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_scale_of_dora_is_its_magnitude_by_the_norm_of_each_output(
    tmp_path: Path, is_turned: bool
) -> None:
    manifest = engine(tmp_path, is_turned=is_turned)
    fitted = fit_adapter(adapter(magnitude=MAGNITUDES), manifest, directory=tmp_path)
    np.testing.assert_allclose(scale_of(fitted), MAGNITUDES / norms(), rtol=1e-7)
    assert fitted.coverage.bindings[NAMES["scale"]] == (NAMES["magnitude"],)


def test_the_norms_are_those_of_the_weights_that_the_engine_has(tmp_path: Path) -> None:
    manifest = engine(tmp_path, dtype="float16")
    fitted = fit_adapter(adapter(magnitude=MAGNITUDES), manifest, directory=tmp_path)
    rounded = norms(W.astype(np.float16))
    np.testing.assert_allclose(scale_of(fitted), MAGNITUDES / rounded, rtol=1e-7)
    assert np.abs(MAGNITUDES / norms() - scale_of(fitted)).max() > 1e-6


def test_the_norm_takes_the_scale_of_b(tmp_path: Path) -> None:
    source = adapter(magnitude=MAGNITUDES)
    weights = dict(source.weights)
    weights[NAMES["B"]] = replace(weights[NAMES["B"]].times(3), tensor=None)
    fitted = fit_adapter(replace(source, weights=weights), engine(tmp_path), directory=tmp_path)
    delta = 3 * (A_VALUES.astype(np.float64) @ B_VALUES)
    right = MAGNITUDES / np.linalg.norm(W + delta, axis=0)
    np.testing.assert_allclose(scale_of(fitted), right, rtol=1e-6)


def test_a_weight_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trt_lora.runtime.files.stored_matrix._BLOCK", 3 * 4 * N)  # 3 rows
    manifest = engine(tmp_path)
    blocks = [*manifest.matrices[SITE].blocks(tmp_path / ONNX_WEIGHTS_FILE)]
    assert [rows for rows, _, _ in blocks] == [slice(0, 3), slice(3, 6), slice(6, 8)]
    fitted = fit_adapter(adapter(magnitude=MAGNITUDES), manifest, directory=tmp_path)
    np.testing.assert_allclose(scale_of(fitted), MAGNITUDES / norms(), rtol=1e-7)


def test_a_preview_reads_no_weight(tmp_path: Path) -> None:
    manifest = engine(tmp_path)
    (tmp_path / ONNX_WEIGHTS_FILE).unlink()
    coverage = preview_adapter(adapter(magnitude=MAGNITUDES), manifest)
    assert coverage.sites[0].vectors == ("scale",)


def test_a_checkpoints_weights_make_the_same_scale() -> None:
    every = slice(None)
    source = with_scales(adapter(magnitude=MAGNITUDES), lambda _: [(every, every, W)], {SITE})
    fitted = fit_adapter(source, VECTORS)
    np.testing.assert_allclose(scale_of(fitted), MAGNITUDES / norms(), rtol=1e-7)


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("kind", ["scale", "bias", "magnitude"])
@pytest.mark.parametrize("strict", [True, False])
def test_an_engine_without_vectors_takes_none(kind: str, strict: bool) -> None:
    with refused(AdapterError, "some/adapter", NAMES[kind], "--lora-vectors"):
        fit_adapter(adapter(**{kind: MAGNITUDES}), PLAIN, strict=strict)


@pytest.mark.parametrize("kind", ["scale", "bias", "magnitude"])
def test_a_vector_of_width_k_is_refused(tmp_path: Path, kind: str) -> None:
    source = adapter(**{kind: np.ones(K, np.float32)})
    with refused(AdapterError, NAMES[kind], f"[{K}]", f"n={N}"):
        fit_adapter(source, engine(tmp_path), directory=tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["scale", "bias", "magnitude"])
def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path, kind: str, value: float) -> None:
    values = MAGNITUDES.copy()
    values[3] = value
    source = adapter(**{kind: values})
    unread = {name: replace(weight, tensor=None) for name, weight in source.weights.items()}
    with refused(AdapterError, NAMES[kind], "NaN or infinity"):
        fit_adapter(replace(source, weights=unread), engine(tmp_path), directory=tmp_path)


@pytest.mark.parametrize("value", [0, -0.5])
def test_a_magnitude_that_is_no_norm_is_refused(tmp_path: Path, value: float) -> None:
    values = MAGNITUDES.copy()
    values[3] = value
    with refused(AdapterError, NAMES["magnitude"], f"holds {value}", "above 0"):
        fit_adapter(adapter(magnitude=values), engine(tmp_path), directory=tmp_path)


def test_a_magnitude_needs_its_a_and_b(tmp_path: Path) -> None:
    with refused(AdapterError, f"{SITE} has DoRA's magnitude without A and B"):
        fit_adapter(of({NAMES["magnitude"]: MAGNITUDES}), engine(tmp_path), directory=tmp_path)


def test_a_scale_needs_its_a_and_b() -> None:
    with refused(AdapterError, NAMES["scale"], "there is no A and B beside it"):
        fit_adapter(of({NAMES["scale"]: MAGNITUDES}), VECTORS)


def test_a_bias_by_itself_is_beside_zeros() -> None:
    fitted = fit_adapter(of({NAMES["bias"]: MAGNITUDES}), VECTORS)
    assert fitted.coverage.adapted[0].vectors == ("bias",)
    a, b = (fitted.tensors[name].numpy() for name in VECTORS.binding_names.pair(SITE))
    assert not a.any()
    assert not b.any()
    assert (a.shape, b.shape) == ((K, 1), (1, N))


@pytest.mark.parametrize("strict", [True, False])
def test_dora_without_the_base_models_weights_is_no_guess(tmp_path: Path, strict: bool) -> None:
    source, manifest = adapter(magnitude=MAGNITUDES), engine(tmp_path)
    advice = "trt-lora convert-adapter IN OUT --format edgellm --base DIR"
    with refused(AdapterError, f"needs the weight of {SITE}", advice):  # codes, or too small
        fit_adapter(source, VECTORS, strict=strict, directory=tmp_path)
    with refused(AdapterError, "needs the base model's weights", advice):
        fit_adapter(source, manifest, strict=strict)
    (tmp_path / ONNX_WEIGHTS_FILE).write_bytes(bytes(100))  # cut short
    with refused(AdapterError, "cannot be read", advice):
        fit_adapter(source, manifest, strict=strict, directory=tmp_path)
    (tmp_path / ONNX_WEIGHTS_FILE).unlink()  # a copy for the plan alone
    with refused(AdapterError, "cannot be read", advice):
        fit_adapter(source, manifest, strict=strict, directory=tmp_path)


@pytest.mark.parametrize("kind", ["scale", "bias", "magnitude"])
def test_vectors_of_a_module_that_is_no_site_are_not_split_or_joined(kind: str) -> None:
    path = SITE.replace("q_proj", "qkv_proj")
    weights = {f"lora_{name}_{path}": values for name, values in PAIR.items()}
    source = of(weights | {f"lora_{kind}_{path}": np.ones(N, np.float32)})
    with refused(AdapterError, path, "not split or joined"):
        fit_adapter(source, VECTORS)
    assert len(fit_adapter(source, VECTORS, strict=False).coverage.unexpected_keys) == 3


@pytest.mark.parametrize("kind", ["scale", "bias", "magnitude"])
def test_what_is_made_of_a_and_b_alone_takes_no_vectors(kind: str) -> None:
    source = adapter(**{kind: MAGNITUDES})
    with refused(AdapterError, NAMES[kind], "not in a blend"):
        blend_adapters("sum", [(source, 0.5)])
    with refused(AdapterError, NAMES[kind]):
        shard_adapter(source, VECTORS, 0, 2)
