"""Another strength of every B: each value times the scale, rounded once, or refused."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_storage
from trt_lora.runtime.store.store import AdapterStore

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def adapter_of(b: Array, dtype: str) -> Adapter:
    """One site with `b`, of NUMPY[dtype], as its B [1, n]."""
    a = np.ones((3, 1), NUMPY[dtype])
    storages = {"lora_A_x": a, "lora_B_x": b.reshape(1, -1)}
    return Adapter(
        "some/adapter",
        {n: weight_of(n, tensor_from_storage(s, dtype)) for n, s in storages.items()},
    )


def scaled_b(values: Array, dtype: str, scale: float) -> Tensor:
    """B of the adapter at a strength, in a store of an engine of one site."""
    manifest = replace(make_manifest(dtype=dtype), sites=(Site("x", 3, values.size, dtype),))
    store = AdapterStore(FakeExecutor(manifest))
    store.add("a", adapter_of(values, dtype))
    return store.lease(f"a@{scale}").loaded.fitted.tensors["lora_B_x"]


def finite_values(dtype: str, largest: float) -> Array:
    """Every value of a 16-bit dtype up to a magnitude, subnormal ones and both zeros included."""
    values = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    with np.errstate(invalid="ignore"):
        found: Array = values[np.abs(values.astype(np.float32)) <= largest]
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [0.5, 0.3, 0.0, -1.7, 4.0, 2.0**-10])
def test_every_value_of_16_bits_is_rounded_once(dtype: str, scale: float) -> None:
    values = finite_values(dtype, LARGEST[dtype] / max(abs(scale), 1))
    found = scaled_b(values, dtype, scale)
    exact = values.astype(np.float32) * np.float32(scale)
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        found.storage().view(np.uint16)[0], exact.astype(NUMPY[dtype]).view(np.uint16)
    )


def test_float32_is_multiplied_as_it_is() -> None:
    values = np.random.default_rng(0).standard_normal(100_003, np.float32)
    found = scaled_b(values, "float32", 0.3)
    np.testing.assert_array_equal(found.numpy()[0], values * np.float32(0.3))


@pytest.mark.parametrize(
    ("dtype", "value", "scale"),
    [("float16", 100.0, -1000.0), ("bfloat16", 3e38, 2.0), ("float32", 3e38, 2.0)],
)
def test_one_product_out_of_range_among_many_is_refused(
    dtype: str, value: float, scale: float
) -> None:
    values = np.ones(70_000, NUMPY[dtype])
    values[65_000] = value
    with pytest.raises(AdapterError, match=f"lora_B_x has a value .*range of {dtype}"):
        scaled_b(values, dtype, scale)
