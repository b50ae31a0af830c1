"""Bugs that such kernels have, planted in their text; the emulation, or the bound, shows each."""

from dataclasses import dataclass

import pytest
from kernels.calls import make_call
from kernels.changed_kernels import outcome
from kernels.emulator import compiler, kernel_text

from trt_lora.plugins.kernels.launch_plan import Chip

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

A100, H200 = Chip((8, 0), 108), Chip((9, 0), 132)
FEW_SMS = Chip((9, 0), 8)  # as many as a cluster has CTAs


@dataclass(frozen=True)
class Bug:
    """A change of the text, and the smallest kind of call that it spoils."""

    name: str
    old: str
    new: str
    m: int
    rank: int
    chip: Chip = H200
    k: int = 136
    n: int = 136
    dtype: str = "float16"
    shows: str = "wrong values"  # or what the emulation says


BUGS = (
    Bug("wrong fragments", "x, a[2], a[3]", "x, a[3], a[2]", 33, 16),
    Bug("wrong matrix rows", "lane % 16 * pitch + lane / 16 * 8", "lane % 16 * pitch", 33, 16),
    Bug(
        "tensor cores before the copies land",
        "    wait_for_copies<0>();\n",
        "",
        33,
        16,
        shows="a race",
    ),
    Bug(
        "rows below m written",
        "if (rows.has(row(i)) && valid > 0)",
        "if (valid > 0)",
        *(33, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "rows below m read",
        "return rows.has(i) ? widen(",
        "return true ? widen(",
        *(3, 16),
        dtype="float32",
        shows="a read outside the buffers",
    ),
    Bug(
        "the end of k not masked",
        "k + i < end ? vector.valid : 0",
        "vector.valid",
        *(33, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "a rest of k dropped",
        "ceil_div(ceil_div(total, parts), unit)",
        "total / parts / unit",
        1,
        16,
        k=137,
    ),
    Bug(
        "a split left out",
        "split < group.splits; ++split)\n",
        "split < group.splits - 1; ++split)\n",
        1,
        136,
        A100,
        600,
    ),
    Bug(
        "the first split read for each",
        "sums_of(group, split, row0 + i)",
        "sums_of(group, 0, row0 + i)",
        1,
        136,
        A100,
        600,
    ),
    Bug(
        "a CTA leaves while others read its part",
        "expand_slice<T, Rows>(group, row0, t, slice);\n  cluster_wait();",
        "expand_slice<T, Rows>(group, row0, t, slice);",
        *(1, 16),
        dtype="float32",
        shows="without waiting at the cluster's barrier",
    ),
    Bug(
        "the wrong half given away",
        "(upper ? second : first) +",
        "(upper ? first : second) +",
        *(4, 16),
        dtype="float32",
    ),
    Bug(
        "alignment taken for granted",
        "stride % WIDTH<T> == 0 && is_aligned(matrix)",
        "true",
        *(1, 17),
        dtype="float32",
        shows="not aligned",
    ),
    Bug(
        "a barrier that half of the threads reach",
        "  __syncthreads();\n  cluster_arrive_relaxed();  // said early",
        "  if (threadIdx.x < 128) __syncthreads();\n  cluster_arrive_relaxed();  // said early",
        *(1, 16),
        dtype="float32",
        shows="wait for threads that never come",
    ),
    Bug(
        "a thread that leaves early",
        "  const int row0 = blockIdx.y * Rows;\n",
        "  const int row0 = blockIdx.y * Rows;\n  if (threadIdx.x == 7) return;\n",
        *(1, 16),
        dtype="float32",
        shows="wait for threads that never come",
    ),
    Bug(
        "two barriers taken for one",
        "  __syncthreads();\n  cluster_arrive_relaxed();  // said early",
        "  if (threadIdx.x < 32) __syncthreads();\n  __syncthreads();\n"
        "  cluster_arrive_relaxed();  // said early",
        *(1, 16),
        dtype="float32",
        shows="threads wait for each other in lines",
    ),
    Bug(
        "warps that share a step take the same k",
        "warp / column_slots * K_STEP}",
        "0}",
        *(33, 16),
        k=1100,
    ),
    Bug(
        "columns of another warp",
        "(COLUMN_SLOTS<Rows> * pair + column_slot) * 16",
        "(COLUMN_SLOTS<Rows> * pair + column_slot / 2 * 2) * 16",
        *(33, 64),
        shows="a race",
    ),
    Bug(
        "a stage overwritten while warps read it",
        "i % STAGES",
        "i % (STAGES - 1)",
        *(33, 16),
        k=4100,
        shows="a race",
    ),
    Bug("the scale dropped", "block.scale[warp_tile.row + row_of_part(part)] * ", "", 33, 16),
    Bug(
        "the low part of t dropped",
        "rest == rest ? rest : 0.0f",
        "0.0f",
        *(33, 16),
    ),
    Bug(
        "rows of x below m read",
        "TileRows(group, row0).has(row) ? at_least",
        "true ? at_least",
        *(33, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "the rest of a last strip stored as t",
        "if (column % WIDTH<T> >= vector.valid) continue;",
        "",
        *(33, 3),
        shows="a race",
    ),
    Bug(
        "each CTA expands the first tiles",
        "row0, tile, t, memory",
        "row0, tile_of_b(group, index - tiles.first), t, memory",
        *(33, 16),
    ),
    Bug(
        "more shared memory than was asked for",
        "float* scratch = t + Rows * group.total_rank;",
        "float* scratch = t + 2 * Rows * group.total_rank;",
        *(1, 128),
        dtype="float32",
        shows="shared memory",
    ),
    Bug(
        "what the cluster reads is not handed over",
        "  cluster_arrive();\n  load_y",
        "  cluster_arrive_relaxed();\n  load_y",
        *(3, 16),
        shows="a race of a write and a read",
    ),
    Bug(
        "a CTA leaves while others read what it handed over",
        "    load_y(columns, group, 0);\n  }\n  cluster_wait();",
        "    load_y(columns, group, 0);\n  }",
        *(3, 16),
        shows="without waiting at the cluster's barrier",
    ),
    Bug(
        "vectors of a chunk not swapped",
        "threadIdx.x ^ threadIdx.x >> 3) & 1",
        "threadIdx.x) & 1",
        3,
        16,
    ),
    Bug("the other half of a chunk", "loaded + half * HALF", "loaded + (1 - half) * HALF", 3, 16),
    Bug(
        "chunks behind the end of k",
        "from, k < vector.rows);",
        "from, vector.rows > 0);",
        *(3, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "more rows of x than there are",
        "at < end && there >> tile * ROW_TILE & 1",
        "at < end",
        *(3, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "the chunks of a step overwritten while warps read them",
        "    __syncthreads();  // the next chunks, or the sums, overwrite them",
        "",
        *(3, 16),
        k=8456,
        shows="a race",
    ),
    Bug(
        "a rank at the end of an odd tile left out",
        "element < vector.valid; ++element",
        "element < vector.valid - 1; ++element",
        *(3, 17),
    ),
    Bug(
        "each warp adds up the first rank tile",
        "(copy << share.shift) * Tiles + tile",
        "(copy << share.shift) * Tiles",
        *(3, 24),
    ),
    Bug(
        "the part of the same CTA from each",
        "read_remote(part, rank));",
        "read_remote(part, 0));",
        3,
        16,
        k=600,
    ),
    Bug("the scale dropped in a decode step", "scale[part % 2] * product", "product", 3, 16),
    Bug(
        "each rank tile expanded from the first",
        "t[first / RANK_TILE * Tiles + tile]",
        "t[tile]",
        3,
        24,
    ),
    Bug("the t of the first rows", "RANK_TILE * Tiles + tile]", "RANK_TILE * Tiles]", 9, 16),
    Bug("the x of the first rows", "row_of(first, tile * ROW_TILE, k) + at", "first + at", 9, 16),
    Bug(
        "the addend of the first rows",
        "i / 2 * ROW_TILE + i % 2",
        "i % 2",
        *(9, 16),
    ),
    Bug(
        "the last rank tile of B for the next rows",
        "if (tile && site.rank > RANK_TILE) load_b(columns, site, 0);",
        "",
        *(9, 24),
    ),
    Bug(
        "the first chunks of x again",
        "if (j && j % Some == 0) x.load(of_x, first + j * step, step);",
        "",
        *(17, 16),
        k=8456,
    ),
    Bug(
        "a cluster's part of k where there is none",
        "ceil_div(group.k, cluster_size() * CHUNK) * CHUNK",
        "ceil_div(group.k, CLUSTER * CHUNK) * CHUNK",
        *(3, 16, A100, 520),
    ),
    Bug(
        "columns of other CTAs where there is no cluster",
        "warp_of_thread() * ctas + cta;",
        "warp_of_thread() * ctas + cta / 2;",
        *(3, 16, A100, 136, 4168),
    ),
    Bug(
        "columns behind the last",
        "columns.mine = columns.first < site.n",
        "columns.mine = true",
        *(3, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "the addend of other columns",
        "ctas * WARPS);\n    load_y(columns, group, 0);",
        "ctas * WARPS);",
        *(3, 16, FEW_SMS, 40, 4168),
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    text = kernel_text()
    assert bug.old in text
    call = make_call(bug.m, bug.k, [(bug.n, bug.rank)], bug.dtype)
    assert bug.shows in outcome(call, bug.chip, text.replace(bug.old, bug.new))
