"""The text that the GPU is given, run on a CPU: right for every shape, and within its memory."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kernels.calls import DTYPES, Call, Sizes, checked_sizes, make_call, random_call
from kernels.emulator import compiler, load, run
from kernels.oracle import Inputs

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import Chip, fused_launch, plan_launches
from trt_lora.plugins.kernels.nvrtc import KERNELS
from trt_lora.runtime.memory.dtypes import storage_dtype

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

A100, A10, H200, RTX5090 = (
    Chip((8, 0), 108),
    Chip((8, 6), 72),
    Chip((9, 0), 132),
    Chip((12, 0), 170),
)
FEW_SMS = Chip((9, 0), 8)  # as many as a cluster has CTAs
RANKS = (1, 3, 8, 16, 17, 64, 256)
ROWS = (1, 2, 7, 8, 33)


def check(call: Call, chip: Chip, *, shift: int = 0) -> None:
    """The outputs are as close to float64 as rounding explains."""
    launches = plan_launches(call.shape, chip, aligned=shift == 0)
    assert call.worst(run(call, launches, shift=shift)) <= 1


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_every_rank_and_number_of_rows_is_computed(
    chip: Chip, dtype: str, m: int, rank: int
) -> None:
    check(make_call(m, 136, [(136, rank), (40, 8)], dtype, has_addend=True), chip)
    check(make_call(m, 136, [(136, rank)], dtype, has_addend=False), chip)


@pytest.mark.parametrize("rank", [1, 8, 17, 64])
@pytest.mark.parametrize("m", [1, 3, 8, 21])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A10, RTX5090], ids=["sm86", "sm120"])
def test_odd_sizes_and_unaligned_addresses_are_computed(
    chip: Chip, dtype: str, m: int, rank: int
) -> None:
    item = storage_dtype(dtype).itemsize
    check(make_call(m, 77, [(35, rank), (64, 16)], dtype), chip)
    check(make_call(m, 80, [(72, rank)], dtype), chip, shift=item)


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_each_site_of_a_group_has_its_own_rank(chip: Chip, dtype: str, m: int) -> None:
    qkv = [(96, 16), (24, 1), (24, 40)]
    eight = [
        (n, rank) for n, rank in zip(range(1, 40, 5), (1, 16, 3, 8, 1, 32, 9, 24), strict=True)
    ]
    check(make_call(m, 96, qkv, dtype), chip)
    check(make_call(m, 50, eight, dtype, has_addend=False), chip)


@pytest.mark.parametrize("rank", [rank for rank in RANKS if rank <= 64])
@pytest.mark.parametrize("m", [9, 16, 17, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_tiles_of_rows_are_one_launch_on_tensor_cores(dtype: str, m: int, rank: int) -> None:
    call = make_call(m, 203, [(133, rank), (40, 8)], dtype, has_addend=m != 16)
    assert [launch.kernel for launch in plan_launches(call.shape, H200)] == [f"fused_tiles_{dtype}"]
    check(call, H200)


@pytest.mark.parametrize("sites", range(1, 9))
@pytest.mark.parametrize("m", [9, 33])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_that_launch_takes_a_rank_for_each_site(dtype: str, m: int, sites: int) -> None:
    """A CTA has several tiles of B, of more than one site."""
    group = [(70, 1), (129, 3), (1, 16), (260, 17), (8, 8), (15, 9), (300, 24), (33, 2)][:sites]
    call = make_call(m, 77, group, dtype)
    assert len(plan_launches(call.shape, FEW_SMS)) == 1
    check(call, FEW_SMS, shift=2)


@pytest.mark.parametrize("sites", range(1, 9))
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 25, 32])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_decode_step_is_one_launch_on_tensor_cores(dtype: str, m: int, sites: int) -> None:
    """Ranks of several tiles, odd ones and dummies side by side; k and n end within a tile."""
    group = [(72, 16), (8, 1), (200, 17), (136, 8), (64, 3), (24, 2), (16, 16), (40, 9)]
    call = make_call(m, 8 * (m + 50), group[-sites:], dtype, has_addend=sites % 2 == 0)
    (launch,) = plan_launches(call.shape, H200)
    ranks = sum(-(-rank // 16) for _, rank in group[-sites:])
    takes = ranks <= (8 if m <= 16 else 7)  # more do not fit shared memory
    assert launch.kernel.startswith("decode" if takes else "fused")
    check(call, H200)


@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize("m", [5, 13, 29])
@pytest.mark.parametrize(
    ("k", "sites"),
    [(40, [(4168, 48), (8, 5)]), (8264, [(24, 16)]), (2088, [(32, 112)]), (1096, [(600, 16)] * 3)],
    ids=["several units of a warp", "several chunks", "a tile for each warp", "clusters"],
)
def test_a_decode_step_takes_more_turns_where_it_is_longer(
    k: int, sites: list[tuple[int, int]], m: int, has_addend: bool
) -> None:
    call = make_call(m, k, sites, "bfloat16", has_addend=has_addend)
    (launch,) = plan_launches(call.shape, FEW_SMS if k == 40 else H200)
    assert launch.kernel == f"decode_bfloat16_{ {5: 8, 13: 16, 29: 32}[m] }"
    assert call.worst(run(call, (launch,))) <= 1


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("m", [5, 13, 29])
@pytest.mark.parametrize(
    ("k", "sites"),
    [(2056, [(600, 16)]), (776, [(264, 17), (8, 1)]), (264, [(4168, 48), (8, 5)])],
    ids=["three turns", "another rank tile", "several units of a warp"],
)
def test_a_gpu_without_clusters_repeats_the_shrink_in_one_launch(
    k: int, sites: list[tuple[int, int]], m: int, order: int
) -> None:
    call = make_call(m, k, sites, "float16")
    (launch,) = plan_launches(call.shape, A10)
    assert (launch.kernel, launch.cluster) == (f"decode_float16_{ {5: 8, 13: 16, 29: 32}[m] }", 1)
    assert call.worst(run(call, (launch,), order=order)) <= 1


@pytest.mark.parametrize(("rank", "k"), [(1, 5003), (17, 4608), (48, 2563), (128, 1288)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_long_k_passes_through_every_stage(dtype: str, rank: int, k: int) -> None:
    check(make_call(9, k, [(24, rank)], dtype), H200)


@pytest.mark.parametrize("m", [511, 512, 577])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_prefill_is_computed(chip: Chip, dtype: str, m: int) -> None:
    check(make_call(m, 40, [(24, 16), (136, 72)], dtype), chip)


def test_prefill_in_float32_is_computed() -> None:
    check(make_call(513, 12, [(24, 16), (40, 5)], "float32"), A100)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_a_long_k_is_split(chip: Chip, dtype: str, m: int) -> None:
    call = make_call(m, 4360, [(40, 136)], dtype, has_addend=False)
    assert plan_launches(call.shape, chip)[0].splits > 1
    check(call, chip)


@pytest.mark.parametrize("sites", [[(24, 512)] * 3, [(16, 512)] * 8], ids=["three", "eight"])
@pytest.mark.parametrize(("dtype", "m"), [*((dtype, 1) for dtype in DTYPES), ("bfloat16", 9)])
def test_the_largest_ranks_are_computed(dtype: str, m: int, sites: list[tuple[int, int]]) -> None:
    check(make_call(m, 16, sites, dtype), H200)


@pytest.mark.parametrize(
    ("m", "sites"),
    [(20, [(40, 16)]), (3, [(40, 200)]), (1, [(72, 512)] * 3), (8, [(9, 5)] * 8)],
    ids=["rows", "rank", "columns", "sites"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["alone", "clusters"])
def test_the_single_kernel_is_right_for_every_shape(
    chip: Chip, dtype: str, m: int, sites: list[tuple[int, int]]
) -> None:
    call = make_call(m, 90, sites, dtype)
    assert call.worst(run(call, (fused_launch(call.shape, chip),))) <= 1


SMALLEST = {  # of the calls above, for every kernel
    launch.kernel: (m, rank, dtype, chip, aligned)
    for aligned in (True, False)
    for dtype in DTYPES
    for m in sorted((1, 3, 9, 17, *ROWS), reverse=True)
    for rank in sorted(RANKS, reverse=True)
    for chip in (A100, H200)
    for launch in plan_launches(
        GroupShape(m, 136, (SiteShape(136, rank),), dtype, True), chip, aligned=aligned
    )
}


def test_the_calls_above_launch_every_kernel() -> None:
    assert set(SMALLEST) == set(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bits_are_the_same_in_whichever_order_threads_run(kernel: str) -> None:
    """No race is found in any call above, so one order more for each kernel will do."""
    m, rank, dtype, chip, aligned = SMALLEST[kernel]
    call = make_call(m, 136, [(136, rank)], dtype)
    launches = plan_launches(call.shape, chip, aligned=aligned)
    (first,), (other,) = (run(call, launches, order=order) for order in (0, 1))
    assert first.tobytes() == other.tobytes()


AFFORDABLE = [sizes for sizes in checked_sizes() if sizes.shape.m <= 9 and sizes.shape.k <= 1096][
    ::4
]


@pytest.mark.parametrize("sizes", AFFORDABLE, ids=lambda sizes: sizes.name)
def test_calls_that_a_gpu_is_checked_with_are_computed(sizes: Sizes) -> None:
    check(random_call(sizes.shape), H200, shift=sizes.shift)


@pytest.mark.parametrize("m", [1, 8, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_a_zero_adapter_changes_no_bit(chip: Chip, dtype: str, m: int) -> None:
    call = make_call(m, 64, [(48, 1), (33, 16)], dtype)
    zeros = tuple(np.zeros_like(b) for b in call.inputs.b)
    minus = tuple(np.where(y > 1, -np.zeros_like(y), y) for y in call.inputs.y)
    zero = Call(call.shape, Inputs(call.inputs.x, call.inputs.a, zeros, minus))
    for z, y in zip(run(zero, plan_launches(call.shape, chip)), minus, strict=True):
        assert z.tobytes() == y.tobytes()
    delta = Call(replace(call.shape, has_addend=False), Inputs(call.inputs.x, call.inputs.a, zeros))
    for out in run(delta, plan_launches(delta.shape, chip)):
        assert not np.any(out)


@pytest.mark.parametrize("m", [1, 8, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_a_large_t_does_not_overflow(chip: Chip, dtype: str, m: int) -> None:
    """T is far beyond float16, the output is not; next to it a row whose t is tiny."""
    call = make_call(m, 64, [(48, 16), (24, 80)], dtype, has_addend=False)
    large, small = (2.0**9, 2.0**-12) if dtype == "float16" else (2.0**60, 2.0**-70)
    by, down = storage_dtype(dtype).type(large), storage_dtype(dtype).type(small)
    x = call.inputs.x * by
    x[1:2] = call.inputs.x[1:2] / by
    a = tuple(a * by for a in call.inputs.a)
    b = tuple(b * down for b in call.inputs.b)
    scaled = Call(call.shape, Inputs(x, a, b))
    assert scaled.worst(run(scaled, plan_launches(call.shape, chip))) <= 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("m", [1, 8, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
def test_what_is_not_finite_reaches_its_row_and_no_other(
    chip: Chip, dtype: str, m: int, value: float
) -> None:
    call = make_call(m, 70, [(48, 1), (33, 12), (16, 80)], dtype)
    call.inputs.x[m // 2, 69] = value
    actual = run(call, plan_launches(call.shape, chip))
    for out, exact, bound in zip(actual, call.expected(), call.bounds(), strict=True):
        finite = np.isfinite(exact)
        assert not np.any(finite[m // 2])
        np.testing.assert_array_equal(out[~finite].astype(np.float64), exact[~finite])
        assert np.all(np.abs(out[finite].astype(np.float64) - exact[finite]) <= bound[finite])


def test_a_half_is_rounded_as_numpy_rounds_it() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    widened = np.array([load().widened(bits) for bits in range(1 << 16)], np.float32)
    np.testing.assert_array_equal(widened, every.astype(np.float32))
    values = np.random.default_rng(0).integers(0, 1 << 32, 20000, np.uint32).view(np.float32)
    small = (values.view(np.uint32) & 0x8FFFFFFF | 0x30000000).view(np.float32)  # about 2^-31 to 1
    for value in (*values[np.isfinite(values)], *small):
        for to_bfloat, dtype in enumerate((np.float16, ml_dtypes.bfloat16)):
            with np.errstate(over="ignore"):
                expected = np.asarray(value).astype(dtype).view(np.uint16)
            assert load().narrow(value, to_bfloat) == expected
