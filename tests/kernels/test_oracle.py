"""The bound: what rounding explains is within it, and what drops a term or a part is not."""

import numpy as np
import pytest
from kernels.calls import DTYPES, Call, make_call
from kernels.oracle import Float64, wide

from trt_lora.runtime.memory.dtypes import Array, storage_dtype

LONG = (16, 4096)  # rank, k


def call_of(dtype: str, rank: int = LONG[0], k: int = LONG[1]) -> Call:
    return make_call(4, k, [(64, rank)], dtype)


def worst(call: Call, delta: Float64 | Array) -> float:
    """The error of y + delta, rounded once, as a part of what is permitted."""
    out = (wide(call.inputs.y[0]) + delta).astype(storage_dtype(call.shape.dtype))
    return call.worst([out])


def as_two(t: Array, dtype: str) -> Float64:
    """T as the sum of two numbers of the dtype, each row scaled to 2^14 and more."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(t).max(axis=1, keepdims=True))) - 14)
    high = (t / scale).astype(storage_dtype(dtype))
    both: Float64 = scale * (
        wide(high) + wide((t / scale - wide(high)).astype(storage_dtype(dtype)))
    )
    return both


@pytest.mark.parametrize(("rank", "k"), [(1, 1), (16, 64), LONG])
@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_sums_are_within_the_bound(dtype: str, rank: int, k: int) -> None:
    call = call_of(dtype, rank, k)
    x, a, b = (each.astype(np.float32) for each in (call.inputs.x, *call.inputs.a, *call.inputs.b))
    t = np.zeros((len(x), rank), np.float32)
    for i in range(k):  # one by one: the longest chain of additions
        t += x[:, i : i + 1] * a[i]
    assert worst(call, t @ b) <= 1
    if dtype != "float32":
        assert worst(call, (as_two(t, dtype).astype(np.float32)) @ b) <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_t_rounded_to_sixteen_bits_is_outside(dtype: str) -> None:
    call = call_of(dtype, 16, 64)
    t = wide(call.inputs.x) @ wide(call.inputs.a[0])
    assert worst(call, wide(t.astype(storage_dtype(dtype))) @ wide(call.inputs.b[0])) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_term_that_is_missing_is_outside(dtype: str) -> None:
    call = call_of(dtype)
    x, a, b = (wide(each) for each in (call.inputs.x, *call.inputs.a, *call.inputs.b))
    assert worst(call, (x[:, 1:] @ a[1:]) @ b) > 1
    assert worst(call, (x @ a[:, 1:]) @ b[1:]) > 1
