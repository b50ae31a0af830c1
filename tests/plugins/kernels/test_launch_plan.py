"""The choice of kernels, grids and splits, on any GPU and for any shape."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_lora.plugins.contract.sites import MAX_RANK, MAX_SITES
from trt_lora.plugins.errors import ConfigError, LoRAError, TensorError
from trt_lora.plugins.kernels.constants import CLUSTER
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import (
    ITEM_BYTES,
    Chip,
    fused_launch,
    plan_launches,
    workspace_bytes,
)
from trt_lora.plugins.kernels.nvrtc import KERNELS
from trt_lora.scripts.bench.llama import LLAMA_3_8B as MODEL
from trt_lora.scripts.bench.llama import QWEN3_600M, LayerShape

pytestmark = pytest.mark.needs_torch

H200 = Chip((9, 0), 132)
A100 = Chip((8, 0), 108)
L40S = Chip((8, 9), 142)

chips = st.builds(
    Chip, st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]), st.integers(1, 400)
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
)


def qkv(m: int, rank: int, dtype: str = "bfloat16") -> GroupShape:
    sites = (SiteShape(4096, rank), SiteShape(1024, rank), SiteShape(1024, rank))
    return GroupShape(m, 4096, sites, dtype, has_addend=True)


def strips(width: int, dtype: str) -> int:
    return math.ceil(width * ITEM_BYTES[dtype] / 16)


def strips_of_a(shape: GroupShape) -> int:
    return sum(strips(site.rank, shape.dtype) for site in shape.sites)


def tiles_of_b(shape: GroupShape) -> int:
    return sum(math.ceil(site.n / 128) for site in shape.sites)


def rows_of(kernel: str) -> int:
    """Rows of a CTA."""
    if "tiles" in kernel:
        return 16 if kernel.startswith("fused") else 64
    return int(kernel.rpartition("_")[2])


@given(shapes, chips)
def test_every_launch_is_one_that_cuda_takes(shape: GroupShape, chip: Chip) -> None:
    for launch in (*plan_launches(shape, chip), fused_launch(shape, chip)):
        assert launch.kernel in KERNELS
        assert launch.block == 256
        assert launch.shared_bytes <= 48 * 1024
        assert 1 <= launch.grid[0] < 2**31
        assert 1 <= launch.grid[1] <= 65535
        assert launch.grid[2] == 1
        assert launch.cluster == (1 if launch.kernel.startswith("expand") else chip.cluster)
        assert launch.grid[0] % launch.cluster == 0


@given(shapes, chips)
def test_the_shrink_covers_every_row_and_rank(shape: GroupShape, chip: Chip) -> None:
    launches = plan_launches(shape, chip)
    if len(launches) == 1:
        assert launches[0].grid[1] * rows_of(launches[0].kernel) >= shape.m
        return
    shrink, expand = launches
    chunks = math.ceil(strips_of_a(shape) / 16)
    tiles = math.ceil(shape.m / rows_of(shrink.kernel))
    assert shrink.grid[0] == tiles * chunks * shrink.cluster
    assert shrink.grid[1] == shrink.splits == expand.splits


@given(shapes, chips)
def test_the_expand_covers_every_row_and_output(shape: GroupShape, chip: Chip) -> None:
    expand = plan_launches(shape, chip)[-1]
    if expand.kernel.startswith("expand_tiles"):
        assert expand.grid[0] == math.ceil(shape.m / 64) * tiles_of_b(shape)
    elif "expand" in expand.kernel:  # the second dimension shares out all strips, however many
        assert expand.grid[0] * rows_of(expand.kernel) >= shape.m


narrow = st.builds(
    GroupShape,
    m=st.integers(1, 80),
    k=sizes,
    sites=st.lists(
        st.builds(SiteShape, sizes, st.integers(1, 40)), min_size=1, max_size=MAX_SITES
    ).map(tuple),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    has_addend=st.booleans(),
)


@given(narrow, chips)
def test_few_tiles_on_tensor_cores_are_one_launch_that_runs_all_at_once(
    shape: GroupShape, chip: Chip
) -> None:
    launch, *others = plan_launches(shape, chip, aligned=False)  # aligned, some have `decode`
    fits = 9 <= shape.m <= 64 and strips_of_a(shape) <= 16 and shape.dtype != "float32"
    assert launch.kernel.startswith("fused_tiles") == (fits and chip.cluster > 1)
    if launch.kernel.startswith("fused_tiles"):
        assert not others
        ctas, tiles, _ = launch.grid
        assert (tiles - 1) * 16 < shape.m <= tiles * 16
        assert ctas == CLUSTER or ctas * tiles <= 2 * chip.multiprocessors
        each = math.ceil(tiles_of_b(shape) / ctas)
        assert (ctas - CLUSTER) * each < tiles_of_b(shape)  # no cluster has nothing to expand


@given(shapes, chips, st.data())
def test_no_call_needs_more_workspace_than_the_largest(
    largest: GroupShape, chip: Chip, data: st.DataObject
) -> None:
    sites = tuple(
        SiteShape(data.draw(sizes), data.draw(st.integers(1, site.rank))) for site in largest.sites
    )
    smaller = replace(largest, m=data.draw(st.integers(1, largest.m)), sites=sites)
    for shape in (largest, smaller):
        launches = plan_launches(shape, chip)
        splits = launches[0].splits if len(launches) > 1 else 0
        assert 4 * splits * shape.m * shape.total_rank <= workspace_bytes(largest)


@pytest.mark.parametrize("tiles", range(64, 72))
def test_two_splits_of_a_large_gpu_without_clusters_fit_the_workspace(tiles: int) -> None:
    shape = GroupShape(64 * tiles, 4096, (SiteShape(4096, 128),), "float16", has_addend=True)
    splits = plan_launches(shape, L40S)[0].splits
    assert splits == 2
    assert 4 * splits * shape.m * shape.total_rank <= workspace_bytes(shape)


@pytest.mark.parametrize(
    ("m", "family"),
    [
        (1, "decode_bfloat16_8"),
        (9, "decode_bfloat16_16"),
        (17, "decode_bfloat16_32"),
        (33, "fused_"),
    ],
)
def test_decode_of_a_small_rank_is_one_launch_where_there_are_clusters(m: int, family: str) -> None:
    (launch,) = plan_launches(qkv(m, 16), H200)
    assert launch.kernel.startswith(family)
    assert launch.grid[0] % CLUSTER == 0
    assert launch.grid[0] <= H200.multiprocessors


LLAMA_3_8B = [
    GroupShape(1, group[0].k, tuple(SiteShape(i.n, 16) for i in group), "float16", False)
    for group in MODEL.groups.values()
]


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", LLAMA_3_8B, ids=list(MODEL.groups))
def test_a_decode_step_of_llama_3_8b_uses_half_of_the_multiprocessors(
    shape: GroupShape, dtype: str, m: int
) -> None:
    (launch,) = plan_launches(replace(shape, m=m, dtype=dtype), H200)
    assert launch.kernel == f"decode_{dtype}_8"
    assert launch.grid[0] >= H200.multiprocessors / 2


@pytest.mark.parametrize(
    ("m", "group", "rank", "kernel", "grid"),
    [
        (1, "qkv", 16, "decode_float16_8", (72, 1, 1)),  # half of the GPU, in clusters
        (1, "o", 16, "decode_float16_8", (72, 1, 1)),
        (1, "gate_up", 16, "decode_float16_8", (80, 1, 1)),  # 448 units, six warps of a CTA
        (1, "down", 16, "decode_float16_8", (72, 1, 1)),
        (8, "o", 128, "decode_float16_8", (72, 1, 1)),  # a rank tile for each warp
        (8, "gate_up", 64, "decode_float16_8", (128, 1, 1)),  # so, and all clusters that there are
        (8, "qkv", 48, "shrink_float16_8", (16, 2, 1)),  # one rank tile more
        (16, "qkv", 16, "decode_float16_16", (72, 1, 1)),
        (32, "qkv", 16, "decode_float16_32", (72, 1, 1)),
        (32, "gate_up", 48, "decode_float16_32", (128, 1, 1)),
        (32, "gate_up", 64, "fused_tiles_float16", (112, 2, 1)),  # t does not fit shared memory
        (33, "qkv", 16, "fused_tiles_float16", (48, 3, 1)),
        (48, "gate_up", 16, "fused_tiles_float16", (80, 3, 1)),  # three tiles of B a CTA
    ],
)
def test_llama_3_8b_has_these_grids_on_an_h100(
    m: int, group: str, rank: int, kernel: str, grid: tuple[int, int, int]
) -> None:
    linears = MODEL.groups[group]
    sites = tuple(SiteShape(linear.n, rank) for linear in linears)
    launch = plan_launches(GroupShape(m, linears[0].k, sites, "float16", True), H200)[0]
    assert (launch.kernel, launch.grid) == (kernel, grid)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"k": 4092},
        {"sites": (SiteShape(4096, 16), SiteShape(1020, 16))},
        {"sites": (SiteShape(64, 1),) * 7 + (SiteShape(64, 17),)},
    ],
    ids=["float32", "k", "n", "rank tiles"],
)
def test_what_a_decode_kernel_cannot_take_is_launched_as_without_alignment(
    change: dict[str, object],
) -> None:
    shape = replace(qkv(8, 16), **change)  # type: ignore[arg-type]
    (launch,) = plan_launches(shape, H200)
    assert launch.kernel.startswith("fused_")
    assert (launch,) == plan_launches(shape, H200, aligned=False)


@given(narrow, chips)
def test_clusters_of_a_decode_step_have_columns(shape: GroupShape, chip: Chip) -> None:
    launch = plan_launches(shape, chip)[0]
    if launch.kernel.startswith("decode"):
        units = sum(math.ceil(site.n / 64) for site in shape.sites)
        assert (launch.grid[0] // launch.cluster - 1) * 4 < units
        assert launch.grid[0] <= max(CLUSTER, chip.multiprocessors)


@pytest.mark.parametrize("chip", [A100, Chip((8, 6), 82), L40S], ids=["8.0", "8.6", "8.9"])
@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize(
    ("model", "alone"),
    [(MODEL, {"o"}), (QWEN3_600M, {"qkv", "o", "gate_up", "down"})],
    ids=["Llama-3-8B", "Qwen3-0.6B"],
)
def test_without_clusters_a_short_shrink_is_repeated_in_one_launch(
    model: LayerShape, alone: set[str], m: int, chip: Chip
) -> None:
    """A CTA waits for A four times at most; addresses that are not aligned are a pair."""
    found = set()
    for group, linears in model.groups.items():
        sites = tuple(SiteShape(linear.n, 16) for linear in linears)
        shape = GroupShape(m, linears[0].k, sites, "float16", True)
        if len(launches := plan_launches(shape, chip)) == 1:
            found.add(group)
            assert launches[0].kernel == f"decode_float16_{max(m, 8)}"
            assert launches[0].grid[0] <= chip.multiprocessors
        assert len(plan_launches(shape, chip, aligned=False)) == 2
    assert found == alone


@pytest.mark.parametrize(("rank", "longest"), [(16, 4096), (32, 2048), (48, 1024), (128, 512)])
def test_the_longest_k_of_one_launch_without_clusters_goes_with_the_rank(
    rank: int, longest: int
) -> None:
    for k, launches in ((longest, 1), (longest + 8, 2)):
        shape = GroupShape(8, k, (SiteShape(4096, rank),), "float16", has_addend=True)
        assert len(plan_launches(shape, L40S)) == launches


@pytest.mark.parametrize(
    ("shape", "chip", "family"),
    [
        (qkv(1, 16), A100, "shrink_bfloat16_1"),
        (qkv(1, 64), H200, "shrink_bfloat16_1"),
        (qkv(1, 48), H200, "shrink_bfloat16_1"),
        (qkv(9, 16), A100, "shrink_tiles_bfloat16"),
        (qkv(9, 64), H200, "shrink_tiles_bfloat16"),
        (qkv(65, 16), H200, "shrink_tiles_bfloat16"),
        (qkv(9, 16, "float32"), H200, "shrink_float32_8"),
        (qkv(2048, 16), H200, "shrink_tiles_bfloat16"),
        (qkv(2048, 16, "float32"), H200, "shrink_float32_8"),
    ],
)
def test_other_calls_are_a_pair(shape: GroupShape, chip: Chip, family: str) -> None:
    shrink, expand = plan_launches(shape, chip)
    assert shrink.kernel == family
    assert expand.kernel.startswith(family[:-1].replace("shrink", "expand"))


@pytest.mark.parametrize("m", [2048, 8192])
def test_prefill_reads_x_once_and_keeps_one_split(m: int) -> None:
    shrink, _ = plan_launches(qkv(m, 32), H200)
    assert (shrink.grid[0], shrink.splits) == (math.ceil(m / 64) * CLUSTER, 1)


def test_a_long_k_is_split_for_idle_multiprocessors() -> None:
    assert plan_launches(qkv(1, 16), A100)[0].splits == 8
    assert plan_launches(replace(qkv(1, 16), k=100), A100)[0].splits == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m": 0}, TensorError, "m is 0: there is nothing to launch; skip the call"),
        ({"k": 0}, TensorError, "k is 0"),
        ({"sites": (SiteShape(0, 1),)}, TensorError, "n is 0"),
        ({"sites": (SiteShape(8, 513),)}, TensorError, "a rank is 513, and 1 to 512"),
        ({"sites": (SiteShape(8, 0),)}, TensorError, "rank-1 zero dummy"),
        ({"sites": ()}, ConfigError, "has 0 sites"),
        (
            {"sites": (SiteShape(8, 8),) * 9},
            ConfigError,
            "has 9 sites, and 1 to 8 .*several groups",
        ),
        ({"dtype": "int8"}, ConfigError, "'int8' is unknown; choose from: float16, bfloat16, flo"),
    ],
)
def test_a_group_that_cannot_be_computed_is_refused(
    change: dict[str, object], error: type[LoRAError], message: str
) -> None:
    shape = replace(qkv(1, 8), **change)  # type: ignore[arg-type]
    for refused in (
        lambda: plan_launches(shape, H200),
        lambda: fused_launch(shape, H200),
        lambda: workspace_bytes(shape),
    ):
        with pytest.raises(error, match=message):
            refused()


def test_a_gpu_without_the_instructions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"need compute capability 8\.0 or newer and .* has 7\.5"):
        plan_launches(qkv(1, 8), Chip((7, 5), 40))
