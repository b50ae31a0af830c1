"""Casts against torch's, bit by bit: every 16-bit float, and float32 where rounding is decided."""

import itertools
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters import cast, exponents
from trt_lora.runtime.adapters.cast import Caster, Conversion
from trt_lora.runtime.adapters.cast_table import CastTable, cast_table
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.safetensors_file import read_safetensors
from trt_lora.runtime.memory.dtypes import Array, is_finite, storage_dtype

pytestmark = pytest.mark.needs_torch

DTYPES = ("float32", "float16", "bfloat16")
SHORT = ("float16", "bfloat16")
SHORT_TO_ANY = list(itertools.product(SHORT, DTYPES))
ANY_TO_ANY = list(itertools.product(DTYPES, DTYPES))
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SCALES = (1.0, 2.0, -0.5, 2.0**-15, 2.0**20, 0.3, 16 / 63**0.5, 1e-10, 1e-30, 1e30, 0.0)
BEYOND = {"float32": 2.0**128, "float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}
CODES = np.arange(1 << 16, dtype=np.uint16)


def every_float(dtype: str) -> Array:
    """All values of a 16-bit dtype; of float32, those beside and between 16-bit ones."""
    if dtype != "float32":
        return CODES.view(storage_dtype(dtype))
    low = [0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF]
    bits = (CODES.astype(np.uint32)[:, None] << 16) | np.array(low, np.uint32)
    return bits.view(np.float32).ravel()


def as_torch(values: Array) -> torch.Tensor:
    integers = torch.from_numpy(values.view(f"i{values.itemsize}").copy())
    return integers.view(TORCH[values.dtype.name])


def scaled(values: Array, scale: float) -> torch.Tensor:
    return as_torch(values).float() * torch.tensor(scale, dtype=torch.float32)


def reference(values: Array, scale: float, target: str) -> tuple[Array, Conversion]:
    """The bits that torch gives, and what changed; a product in float32 is no change."""
    exact = scaled(values, scale)
    stored = exact.to(TORCH[target])
    found = stored.float()
    flushed = ((exact != 0) & (found == 0)).sum().item()
    bits: Array = stored.view(torch.int32 if target == "float32" else torch.int16).numpy()
    return bits, Conversion((exact - found).abs().max().item(), int(flushed))


def written(caster: Caster, values: Array, scale: float, target: str) -> tuple[Array, Conversion]:
    out = np.empty(values.shape, storage_dtype(target))
    weight = Weight(("w",), values.shape, values.dtype.name, lambda buffer=None: values, scale)
    conversion = caster.write(weight, target, out, "some weight")
    return out.view(f"i{out.itemsize}"), conversion


def assert_exact(caster: Caster, values: Array, scale: float, target: str) -> None:
    """The bits of every result, the largest error and the number of lost values."""
    found, expected = written(caster, values, scale, target), reference(values, scale, target)
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


def refuses(caster: Caster, values: Array, scale: float, target: str) -> bool:
    try:
        written(caster, values, scale, target)
    except AdapterError:
        return True
    return False


@pytest.fixture(params=["by exponents", "by table", "by arithmetic"])
def caster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Caster:
    """One that takes one way for all values, where the cast has that way."""
    monkeypatch.setattr(cast, "_TABLE_PAYS", 1 << 40 if request.param == "by arithmetic" else 0)
    monkeypatch.setattr(exponents, "_FEW", 1 if request.param == "by exponents" else -1)
    return Caster()


# --------------------------------------------------------------------------------- every value


@pytest.mark.parametrize(("source", "target"), SHORT_TO_ANY)
def test_every_16_bit_float_becomes_what_torch_makes_of_it(
    caster: Caster, source: str, target: str
) -> None:
    for scale in SCALES:
        values = every_float(source)
        taken = values[(scaled(values, scale).abs() < BEYOND[target]).numpy()]
        assert len(taken) > 1
        assert_exact(caster, taken[None], scale, target)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("scale", [1.0, -2.0, 0.3, 2.0**-20])
def test_every_critical_float32_becomes_what_torch_makes_of_it(target: str, scale: float) -> None:
    values = every_float("float32")
    taken = values[(scaled(values, scale).abs() < BEYOND[target]).numpy()]
    rows = taken[: len(taken) // 40 * 40].reshape(40, -1)
    assert_exact(Caster(), rows, scale, target)
    assert_exact(Caster(), rows.T, scale, target)


@pytest.mark.parametrize(("source", "target"), SHORT_TO_ANY)
def test_each_16_bit_float_that_has_no_place_is_refused(
    caster: Caster, source: str, target: str
) -> None:
    """In whatever tile it is."""
    scale = 2.0**15
    values = every_float(source)
    beyond = values[~(scaled(values, scale).abs() < BEYOND[target]).numpy()]
    assert len(beyond) > 100
    for i, value in enumerate(beyond[:: len(beyond) // 40][:40]):
        some = np.ones((400, 300), values.dtype)
        some[10 * i, -1] = value
        assert refuses(caster, some, scale, target)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF])
def test_nan_and_infinity_in_float32_are_refused(target: str, bits: int) -> None:
    values = np.ones((3, 5), np.float32)
    values.view(np.uint32)[1, 2] = bits
    assert refuses(Caster(), values, 1.0, target)


@pytest.mark.parametrize("target", SHORT)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_range_ends_where_torch_rounds_to_infinity(target: str, sign: int) -> None:
    beyond = np.float32(BEYOND[target]) * np.ones((1, 2), np.float32)
    last = np.nextafter(beyond, np.float32(0))
    assert refuses(Caster(), sign * beyond, 1.0, target)
    assert_exact(Caster(), sign * last, 1.0, target)


@pytest.mark.parametrize(("source", "target"), ANY_TO_ANY)
def test_zeros_keep_their_sign(caster: Caster, source: str, target: str) -> None:
    values = np.array([[0.0, -0.0]]).astype(storage_dtype(source))
    for scale in (1.0, 0.3, -2.0):
        assert_exact(caster, values, scale, target)


SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    SHAPES,
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.floats(-4, 4, width=32),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_any_shape_and_order_is_cast_as_torch_casts_it(
    shape: tuple[int, int], source: str, target: str, scale: float, seed: int, transposed: bool
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 8, shape)
    stored = values.astype(np.float32).astype(storage_dtype(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cast, "_TABLE_PAYS", 20_000)
        assert_exact(Caster(), stored.T if transposed else stored, scale, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_is_what_torch_calls_so(dtype: str) -> None:
    values = every_float(dtype)[:: 7 if dtype == "float32" else 1]
    expected = torch.isfinite(as_torch(values)).numpy()
    assert is_finite(values[expected])
    beyond = values[~expected]
    assert not any(map(is_finite, beyond[:: len(beyond) // 200 + 1].reshape(-1, 1)))


@pytest.mark.parametrize("scale", [1.0, 2.0, -0.5, 0.3, 1e30])
def test_a_processor_that_flushes_subnormal_numbers_changes_nothing(scale: float) -> None:
    short = every_float("float16")
    long = every_float("float32")[5::7]
    size = scaled(long, scale).abs().numpy()
    long = long[(size < BEYOND["float16"]) & (size > 2.0**-120) & (np.abs(long) > 2.0**-120)]
    cases = [(short[np.isfinite(short)][None], "float32"), (long[None], "float16")]
    expected = [reference(values, scale, target) for values, target in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        assert np.float32(2.0**-140) * np.float32(4) == 0
        found = [written(Caster(), values, scale, target) for values, target in cases]
    finally:
        torch.set_flush_denormal(False)
    for (bits, change), (expected_bits, expected_change) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits, expected_bits)
        assert change == expected_change


# --------------------------------------------------------------------------------- the exponents


@pytest.mark.parametrize("dtype", SHORT)
def test_a_power_of_two_is_an_addition_to_the_exponents_within_a_dtype(dtype: str) -> None:
    for scale in (1.0, 2.0, 32.0, -0.5, 2.0**-4):
        shift = cast_table(dtype, dtype, scale).shift
        assert shift is not None
        magnitudes = np.arange(shift.least, shift.least + shift.count, dtype=np.uint16)
        bits = np.concatenate([magnitudes, magnitudes | np.uint16(1 << 15)])
        exact = scaled(bits.view(storage_dtype(dtype)), scale).numpy()
        sums = (bits + np.uint16(shift.add)).view(storage_dtype(dtype))
        np.testing.assert_array_equal(sums.astype(np.float32), exact)


@pytest.mark.parametrize(
    ("source", "target", "scale"),
    [("float16", "float16", 0.3), ("bfloat16", "bfloat16", 3.0), ("bfloat16", "float16", 2.0),
     ("float16", "bfloat16", 1.0), ("float16", "float16", 0.0), ("float16", "float16", 1e30)],
)  # fmt: skip
def test_other_casts_are_no_addition(source: str, target: str, scale: float) -> None:
    assert cast_table(source, target, scale).shift is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_any_share_of_subnormal_numbers_is_cast_exactly(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cast, "_TABLE_PAYS", 0)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((900, 200), np.float32)
    values[500:][rng.random((400, 200)) < share] *= 1e-7  # the first tile has none
    for scale in (2.0, -0.25):
        assert_exact(Caster(), values.astype(np.float16), scale, "float16")
        assert_exact(Caster(), values.astype(np.float16).T, scale, "float16")


# ------------------------------------------------------------------------------------ the tables


def test_a_table_is_made_once_for_a_cast_and_only_where_it_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, str, float]] = []

    def make(source: str, target: str, scale: float) -> CastTable:
        made.append((source, target, scale))
        return cast_table(source, target, scale)

    monkeypatch.setattr(cast, "_TABLE_PAYS", 1000)
    monkeypatch.setattr(cast, "cast_table", make)
    caster, values = Caster(), np.ones((20, 20), np.float16)
    for scale in (2.0, 2.0, 0.5, 2.0, 2.0, 1.0, 1.0, 1.0):
        assert_exact(caster, values, scale, "float16")
    assert made == [("float16", "float16", 2.0)]


# ------------------------------------------------------------------------------------ the memory


def random_file(path: Path, dtype: str, shapes: Mapping[str, tuple[int, int]]) -> int:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(TORCH[dtype])
        for name, shape in shapes.items()
    }
    save_file(tensors, path)
    return path.stat().st_size


def peak_of_casts(path: Path, target: str, scales: int) -> int:
    """Most bytes held while all tensors of a file are cast, with so many scales in turns."""
    tracemalloc.start()
    try:
        weights = {
            t.name: Weight((t.name,), t.shape, t.dtype, t.read, 1 / (2 + i % scales)).transposed()
            for i, t in enumerate(read_safetensors(path).tensors)
        }
        pack_weights(weights, dict.fromkeys(weights, target), str(path))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "target"), [*itertools.product(SHORT, SHORT), ("float32", "float16")]
)
@pytest.mark.parametrize(
    ("count", "rows", "scales"), [(1, 1, 1), (2, 130, 2), (8, 130, 8), (30, 33, 30), (12, 350, 6)]
)
def test_casts_take_no_more_than_twice_the_file_and_two_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str,
    count: int, rows: int, scales: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    path = tmp_path / "x.safetensors"
    size = random_file(path, source, {f"w{i}": (rows, 4096) for i in range(count)})
    assert peak_of_casts(path, target, scales) <= 2 * size + (2 << 20)
