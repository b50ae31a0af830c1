"""Rows with adapters of their own, on a CPU: each as if it were alone with its adapter."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from kernels.calls import DTYPES
from kernels.emulator import compiler, run
from kernels.oracle import Inputs
from kernels.slot_calls import SlotCall, slot_call, with_passes_at_once

from trt_lora.plugins.contract.slots import BASE_SLOT as BASE
from trt_lora.plugins.kernels.constants import TILE_COLUMNS
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.nvrtc import SLOT_KERNELS
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.scripts.bench.gpu.row_mixes import MIXES, mix

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

A100, H200 = Chip((8, 0), 108), Chip((9, 0), 132)
FEW_SMS = Chip((9, 0), 8)  # as many as a cluster has CTAs
ONE_SM = Chip((8, 0), 1)
CHIPS = pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
SITES = [(136, 64), (40, 16)]  # n, and the rank of the stacks
RANKS = [(16, 8), (3, 16), (0, 5), (17, 1), (0, 0), (64, 16)]  # of the adapter in each slot
# Of 70 rows float32 has the kernels that it has of 20.
ROWS = pytest.mark.parametrize(
    ("dtype", "rows"), [*product(DTYPES, (1, 3, 8, 20)), ("float16", 70), ("bfloat16", 70)]
)


def some_call(rows: int, name: str, dtype: str, *, has_addend: bool = True) -> SlotCall:
    return slot_call(mix(name, rows, 6), 136, SITES, RANKS, dtype, has_addend=has_addend)


def outputs(call: SlotCall, chip: Chip, *, aligned: bool = True) -> list[Array]:
    """As planned; and the bits are the same where the passes come one after the other."""
    shift = 0 if aligned else storage_dtype(call.shape.dtype).itemsize
    launches = launches_of(call.shape, chip, aligned=aligned)
    found = run(call, launches, shift=shift)
    again = run(call, with_passes_at_once(launches, 1), shift=shift)
    for first, second in zip(found, again, strict=True):
        assert first.tobytes() == second.tobytes()
    return found


@pytest.mark.parametrize("name", MIXES)
@ROWS
@CHIPS
def test_every_row_gets_the_delta_of_its_adapter(
    chip: Chip, dtype: str, rows: int, name: str
) -> None:
    call = some_call(rows, name, dtype, has_addend=rows != 3)
    assert call.worst(outputs(call, chip)) <= 1


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@CHIPS
def test_odd_sizes_and_unaligned_addresses_are_computed(chip: Chip, dtype: str, rows: int) -> None:
    slot = mix("uniform", rows, 3)
    call = slot_call(slot, 77, [(35, 3), (24, 17)], [(1, 17), (3, 0), (2, 9)], dtype)
    assert call.worst(outputs(call, chip, aligned=False)) <= 1


@pytest.mark.parametrize("rows", [2, 66])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_stacks_are_computed(dtype: str, rows: int) -> None:
    """Several column tiles, of which small adapters have fewer; k is split for few rows."""
    ranks = [(16, 0), (256, 64), (130, 1)]
    k = 2100 if rows == 2 else 300
    call = slot_call(mix("distinct", rows, 3), k, [(24, 256), (40, 64)], ranks, dtype)
    launches = launches_of(call.shape, H200)
    assert (max(launch.splits for launch in launches) > 1) == (rows == 2)
    assert call.worst(run(call, launches)) <= 1


@pytest.mark.parametrize("rows", [130, 600])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_prompt_of_several_rows_is_computed(dtype: str, rows: int) -> None:
    """Tokens of a row lie side by side, and a tile of 64 has those of two or three rows."""
    slot = np.repeat([2, BASE, 0, 2, 1], rows // 5)
    call = slot_call(slot, 40, [(24, 16)], [(16,), (8,), (16,)], dtype)
    few = Chip((9, 0), 1)  # too few multiprocessors for several passes at once
    assert all(launch.grid[2] == 1 for launch in launches_of(call.shape, few))
    assert call.worst(run(call, launches_of(call.shape, few))) <= 1


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize(
    ("chip", "rows", "widths", "ranks"),
    [(FEW_SMS, 33, (640, 256, 256), (8, 0, 8)), (H200, 48, (14336, 14336), (16, 0))],
    ids=["q and v without k", "gate without up of Llama-3-8B"],
)
def test_a_site_without_a_rank_leaves_the_tile_before_it_alone(
    chip: Chip, rows: int, widths: tuple[int, ...], ranks: tuple[int, ...], order: int
) -> None:
    """A CTA computes several tiles of B, on both sides of a border between sites."""
    call = slot_call([0] * rows, 32, [(n, max(ranks)) for n in widths], [ranks], "float16")
    (launch,) = launches_of(call.shape, chip)
    assert launch.kernel == "slots_fused_tiles_float16"
    tiles = [n // TILE_COLUMNS for n in widths]
    of_a_cta = -(-sum(tiles) // launch.grid[0])
    assert tiles[0] % of_a_cta  # the border is within a CTA's tiles
    assert call.worst(run(call, (launch,), order=order)) <= 1


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize(
    ("chip", "dtype", "rows", "aligned", "kernel"),
    [
        (FEW_SMS, "float16", 5, True, "decode_float16_8"),
        (Chip((9, 0), 24), "float16", 5, True, "decode_float16_8"),
        (FEW_SMS, "float16", 5, False, "fused_float16_8"),
        (FEW_SMS, "float16", 13, True, "decode_float16_16"),
        (FEW_SMS, "float16", 29, True, "decode_float16_16"),
        (FEW_SMS, "float16", 33, True, "fused_tiles_float16"),
        (ONE_SM, "float32", 5, True, "expand_float32_8"),
        (ONE_SM, "float16", 17, True, "decode_float16_16"),
        (ONE_SM, "float16", 33, True, "expand_tiles_float16"),
    ],
    ids=[
        "decode",
        "clusters",
        "fused",
        "decode 16",
        "decode twice",
        "fused_tiles",
        "pair",
        "decode without clusters",
        "tiles",
    ],
)
def test_ctas_with_columns_of_many_sites_pass_over_those_without_a_rank(
    chip: Chip, dtype: str, rows: int, aligned: bool, kernel: str, order: int
) -> None:
    """Columns of one site after those of another, and slots in turn: each of any rank or none."""
    sites = [(4168, 8), (264, 8), (264, 8)]
    ranks = [(8, 0, 8), (0, 8, 0), (0, 0, 0), (8, 8, 0)]
    slot = [(0, 1, BASE, 2, 3)[row % 5] for row in range(rows)]
    call = slot_call(slot, 32, sites, ranks, dtype)
    launches = launches_of(call.shape, chip, aligned=aligned)
    assert launches[-1].kernel == f"slots_{kernel}"
    shift = 0 if aligned else storage_dtype(dtype).itemsize
    for few in (launches, with_passes_at_once(launches, 1)):
        assert call.worst(run(call, few, shift=shift, order=order)) <= 1


@pytest.mark.parametrize("slot", [6, 99, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("rows", [2, 20, 70])
def test_what_is_no_slot_is_the_base_model(rows: int, slot: int) -> None:
    call = some_call(rows, "uniform", "float16")
    changed = call.with_slots([slot, *call.slot[1:]])
    assert changed.worst(outputs(changed, H200)) <= 1


@ROWS
@CHIPS
def test_a_row_of_the_base_model_keeps_every_bit(chip: Chip, dtype: str, rows: int) -> None:
    call = some_call(rows, "one base row among many", dtype)
    y = tuple(np.where(y > 1, -np.zeros_like(y), y) for y in call.inputs.y)
    call = SlotCall(call.shape, replace(call.inputs, y=y))
    for z, addend in zip(outputs(call, chip), y, strict=True):
        assert z[rows // 2].tobytes() == addend[rows // 2].tobytes()


@ROWS
@CHIPS
def test_no_bit_of_a_row_depends_on_its_neighbours(chip: Chip, dtype: str, rows: int) -> None:
    call = some_call(rows, "distinct", dtype)
    others = np.arange(rows) % 2 == 1
    x = np.where(others[:, None], call.inputs.x * call.inputs.x.dtype.type(2), call.inputs.x)
    before = run(call, launches_of(call.shape, chip))
    for slot in (BASE, 5):
        changed = SlotCall(call.shape, replace(call.inputs, x=x))
        changed = changed.with_slots(np.where(others, slot, call.slot))
        for old, new in zip(before, run(changed, launches_of(call.shape, chip)), strict=True):
            assert old[~others].tobytes() == new[~others].tobytes()


@ROWS
@CHIPS
def test_no_bit_of_a_row_depends_on_its_slot(chip: Chip, dtype: str, rows: int) -> None:
    call = some_call(rows, "uniform", dtype)
    order = np.array([3, 0, 4, 5, 1, 2])  # slot i has what slot order[i] had
    given = call.inputs
    a, b = (tuple(stack[order] for stack in stacks) for stacks in (given.a, given.b))
    slot = np.argsort(order)[call.slot].astype(np.int32)
    moved = SlotCall(call.shape, Inputs(given.x, a, b, given.y, (slot, given.rows[1][order])))
    launches = launches_of(call.shape, chip)
    for old, new in zip(run(call, launches), run(moved, launches), strict=True):
        assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@ROWS
def test_what_is_not_finite_stays_in_its_row(dtype: str, rows: int, value: float) -> None:
    call = some_call(rows, "identical", dtype)
    before = run(call, launches_of(call.shape, H200))
    x = call.inputs.x.copy()
    x[rows // 2, 135] = value
    others = np.arange(rows) != rows // 2
    found = run(SlotCall(call.shape, replace(call.inputs, x=x)), launches_of(call.shape, H200))
    for old, new in zip(before, found, strict=True):
        assert not np.isfinite(new[~others].astype(np.float64)).any()
        assert old[others].tobytes() == new[others].tobytes()


def launched() -> Iterator[str]:
    """The kernels of calls as above."""
    for dtype, rows, chip in product(DTYPES, (1, 3, 5, 8, 20, 70), (A100, H200)):
        for aligned in (True, False):
            shape = some_call(rows, "uniform", dtype).shape
            yield from (each.kernel for each in launches_of(shape, chip, aligned=aligned))


def test_the_calls_above_launch_every_kernel() -> None:
    assert set(launched()) == set(SLOT_KERNELS)


@pytest.mark.parametrize("rows", [3, 8, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@CHIPS
def test_the_bits_are_the_same_in_whichever_order_threads_run(
    chip: Chip, dtype: str, rows: int
) -> None:
    call = some_call(rows, "Zipf", dtype)
    launches = with_passes_at_once(launches_of(call.shape, chip), 1)
    first, other = (run(call, launches, order=order) for order in (0, 1))
    for one, two in zip(first, other, strict=True):
        assert one.tobytes() == two.tobytes()
