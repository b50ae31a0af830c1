"""Rows with adapters of their own on a GPU: against float64, and each apart from the others."""

from collections.abc import Callable

import numpy as np
import pytest
from kernels.call_buffers import CallBuffers
from kernels.calls import DTYPES
from kernels.guarded_buffer import CudaMemory
from kernels.slot_calls import SlotCall, slot_call

from trt_lora.plugins.contract.slots import BASE_SLOT as BASE
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.launcher import Kernels
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.bench.gpu.gpu_tests import WORST
from trt_lora.scripts.bench.gpu.row_mixes import MIXES, mix

pytestmark = pytest.mark.gpu

RANKS = [(16, 8), (3, 16), (0, 5), (17, 1), (0, 0), (64, 16)]


def some_call(rows: int, name: str, dtype: str) -> SlotCall:
    return slot_call(mix(name, rows, len(RANKS)), 1096, [(264, 64), (72, 16)], RANKS, dtype)


def outputs(call: SlotCall) -> list[Array]:
    with CallBuffers(call, CudaMemory()) as buffers:
        return buffers.run(lambda placed: Kernels().launch(call.shape, placed, 0))


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 33, 64, 100, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_gets_the_delta_of_its_adapter(
    gpu: Chip, record_property: Callable[[str, object], None], dtype: str, rows: int, name: str
) -> None:
    call = some_call(rows, name, dtype)
    worst = call.worst(outputs(call))
    kernels = [each.kernel for each in launches_of(call.shape, gpu)]
    record_property("kernels", " + ".join(kernels))
    record_property(WORST, worst)
    assert worst <= 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("n", [14336, 14464])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_site_without_a_rank_leaves_the_tile_before_it_alone(dtype: str, n: int) -> None:
    """Llama-3-8B's gate without up, then both a tile wider: a CTA with clusters has tiles of each.

    Calls repeat, since a race is not lost every time.
    """
    call = slot_call([0] * 48, 4096, [(n, 16), (n, 16)], [(16, 0)], dtype)
    first = outputs(call)
    assert call.worst(first) <= 1
    for _ in range(20):
        for one, other in zip(first, outputs(call), strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("rows", [2, 8, 33, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_depends_on_its_neighbours(gpu: Chip, dtype: str, rows: int) -> None:
    call = some_call(rows, "distinct", dtype)
    others = np.arange(rows) % 2 == 1
    before = outputs(call)
    for slot in (BASE, 0, 5):
        after = outputs(call.with_slots(np.where(others, slot, call.slot)))
        for old, new in zip(before, after, strict=True):
            assert old[~others].tobytes() == new[~others].tobytes()
