"""Weights in one buffer: aligned, in order, whatever the number of threads that cast them."""

import numpy as np
import pytest

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters import pack as packed
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Weight, weight_of
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import ALIGNMENT
from trt_lora.runtime.memory.tensor import tensor_from_numpy


def weights(count: int = 5) -> dict[str, tuple[Array, Weight]]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((7 + i, 300), np.float32) for i in range(count)]
    return {
        f"w{i}": (array, weight_of(f"w{i}", tensor_from_numpy(array)).transposed().times(1.5))
        for i, array in enumerate(arrays)
    }


@pytest.mark.parametrize("large", [1, 1 << 30], ids=["several threads", "one thread"])
def test_every_weight_is_cast_and_reported_under_its_name(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_LARGE", large)
    monkeypatch.setattr(packed, "_SHARE", 1)
    given = weights()
    dtypes = dict.fromkeys(given, "float16") | {"w3": "float32"}
    tensors, changes = pack_weights({n: w for n, (_, w) in given.items()}, dtypes, "x")
    for name, (array, _) in given.items():
        exact = array.T * np.float32(1.5)
        np.testing.assert_array_equal(tensors[name].numpy(), exact.astype(dtypes[name]))
        error = np.abs(exact - exact.astype(dtypes[name]).astype(np.float32)).max()
        assert changes[name].rounding_error == pytest.approx(float(error), abs=0)
        assert tensors[name].pointer % ALIGNMENT == 0
    assert sorted(changes) == sorted(given)


@pytest.mark.parametrize("large", [1, 1 << 30], ids=["several threads", "one thread"])
def test_one_bad_weight_among_many_is_refused_by_name(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_LARGE", large)
    monkeypatch.setattr(packed, "_SHARE", 1)
    given = weights()
    given["w2"][0][3, 17] = np.nan
    with pytest.raises(AdapterError, match="x: w2 holds NaN or infinity"):
        pack_weights({n: w for n, (_, w) in given.items()}, dict.fromkeys(given, "float32"), "x")


def test_no_weights_are_no_tensors() -> None:
    assert pack_weights({}, {}, "x") == ({}, {})
