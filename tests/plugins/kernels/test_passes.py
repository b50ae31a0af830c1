"""Launches of calls whose rows have adapters of their own, on any GPU and for any shape."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_lora.plugins.contract.sites import MAX_RANK, MAX_SITES
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.constants import PASS_BYTES
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import ITEM_BYTES, Chip, plan_launches
from trt_lora.plugins.kernels.launcher import group_of
from trt_lora.plugins.kernels.nvrtc import SLOT_KERNELS
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.llama import LLAMA_3_8B as MODEL

pytestmark = pytest.mark.needs_torch

H200 = Chip((9, 0), 132)

chips = st.builds(
    Chip, st.sampled_from([(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)]), st.integers(1, 400)
)
ranks = st.one_of(st.integers(1, MAX_RANK), st.sampled_from([1, 8, 16, 64, 256, 512]))
sizes = st.one_of(st.integers(1, 64), st.integers(1, 60000))
shapes = st.builds(
    GroupShape,
    m=st.one_of(st.integers(1, 64), st.integers(1, 40000)),
    k=sizes,
    sites=st.lists(st.builds(SiteShape, sizes, ranks), min_size=1, max_size=MAX_SITES).map(tuple),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    has_addend=st.booleans(),
    stacks=st.builds(StackShape, st.integers(1, 100), st.just(8), st.just((0,) * MAX_SITES)),
)


@given(shapes, chips, st.booleans())
def test_every_launch_is_one_that_cuda_takes(shape: GroupShape, chip: Chip, aligned: bool) -> None:
    for launch in launches_of(shape, chip, aligned=aligned):
        assert launch.kernel in SLOT_KERNELS
        assert launch.shared_bytes <= 48 * 1024
        assert 1 <= launch.grid[1] <= 65535
        assert 1 <= launch.grid[2] <= 64
        assert launch.grid[0] % launch.cluster == 0


@given(shapes, chips)
def test_there_are_as_many_launches_as_for_one_adapter(shape: GroupShape, chip: Chip) -> None:
    one = plan_launches(replace(shape, stacks=None), chip)
    assert launches_of(replace(shape, stacks=None), chip) == one
    assert len(launches_of(shape, chip)) == len(one)


@given(shapes, chips)
def test_passes_at_once_fill_the_gpu_and_none_waits_for_another(
    shape: GroupShape, chip: Chip
) -> None:
    assert shape.stacks is not None
    room = 2 * chip.multiprocessors
    for launch in launches_of(shape, chip):
        most = min(64, shape.m, shape.stacks.slots + 1)
        width, height, passes = launch.grid
        if "decode" in launch.kernel:
            clusters = width // launch.cluster
            assert launch.splits <= clusters <= launch.splits * most
            assert passes == 1
        else:
            assert passes == most or passes * width * height > room - height
            assert passes == 1 or (passes - 1) * width * height < room


@pytest.mark.parametrize(("k", "grid"), [(4096, (48, 4, 2)), (14336, (32, 4, 3))])
def test_64_rows_start_no_more_passes_than_an_h100_has_room_for(
    k: int, grid: tuple[int, int, int]
) -> None:
    widths = (4096, 1024, 1024) if k == 4096 else (4096,)
    stacks = StackShape(8, 224, tuple(range(len(widths))))
    sites = tuple(SiteShape(n, 16) for n in widths)
    (launch,) = launches_of(GroupShape(64, k, sites, "float16", True, stacks), H200)
    assert launch.grid == grid


@pytest.mark.parametrize(("rows", "grid"), [(1, 72), (2, 144), (4, 264), (8, 264), (16, 264)])
def test_a_decode_step_of_many_adapters_is_one_wave_on_an_h100(rows: int, grid: int) -> None:
    """Two CTAs a multiprocessor; a row alone has as many as without slots."""
    stacks = StackShape(8, 224, (0, 1))
    shape = GroupShape(rows, 4096, (SiteShape(4096, 16),) * 2, "float16", True, stacks)
    (launch,) = launches_of(shape, H200)
    assert (launch.grid, launch.splits) == ((grid, 1, 1), 9)


@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("rank", [16, 32])
def test_a_llama_group_decodes_in_one_launch(m: int, rank: int) -> None:
    for linears in MODEL.groups.values():
        sites = tuple(SiteShape(linear.n, rank) for linear in linears)
        stacks = StackShape(8, 224, tuple(range(len(sites))))
        shape = GroupShape(m, linears[0].k, sites, "float16", True, stacks)
        (launch,) = launches_of(shape, H200)
        assert launch.shared_bytes > PASS_BYTES


def test_the_argument_says_where_rows_and_ranks_lie() -> None:
    sites = (SiteShape(32, 16), SiteShape(24, 8))
    shape = GroupShape(2, 64, sites, "float16", True, StackShape(5, 12, (7, 3)))
    buffers = GroupBuffers(16, (32, 48), (64, 80), (96, 112), (128, 144), 160, 176, 192)
    group = group_of(shape, buffers, splits=1)
    found = group.stacks
    assert (found.slot, found.rank, found.slots, found.sites) == (176, 192, 5, 12)
    assert (found.columns, found.column_tiles) == (24, 1)
    assert [site.of_ranks for site in group.site[:2]] == [7, 3]
    for missing in (buffers._replace(slot=0), buffers._replace(rank=0)):
        with pytest.raises(TensorError, match=r"the rows' slots are at 0x.*, their ranks at 0x"):
            group_of(shape, missing, splits=1)
