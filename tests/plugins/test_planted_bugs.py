"""Bugs that such kernels have, planted in their text: the emulation, or the bound, shows each."""

from ctypes import CDLL
from dataclasses import dataclass

import pytest
from emulation.cases import Call, make_call
from emulation.emulator import EmulationError, build, compiler, kernel_text, run

from trt_lora.plugins.launch import Chip, Launch, plan_launches, workspace_bytes

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

A100, H200 = Chip((8, 0), 108), Chip((9, 0), 132)
ORDERS = 4  # of the threads, until one shows the bug
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
    ),
    Bug(
        "a step used before all have staged it",
        "__syncthreads();  // step i has come",
        "// step i has come",
        *(33, 16, A100),
    ),
    Bug(
        "a block overwritten while warps read it",
        "TILE_COLUMNS));\n    __syncthreads();\n",
        "TILE_COLUMNS));\n",
        *(64, 256),
    ),
    Bug(
        "rows below m written",
        "if (row0 + row < group.m && valid > 0)",
        "if (valid > 0)",
        *(33, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "rows below m read",
        "return i < rows ? widen(",
        "return true ? widen(",
        *(3, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "the end of k not masked",
        "k + i < end ? strip.valid : 0",
        "strip.valid",
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
        "parts read before they are there",
        "  cluster_arrive();\n  cluster_wait();\n  const auto keep",
        "  const auto keep",
        *(1, 16),
    ),
    Bug(
        "a CTA leaves while others read its part",
        "expand_slice<T, Rows>(group, row0, t, slice);\n  cluster_wait();",
        "expand_slice<T, Rows>(group, row0, t, slice);",
        *(1, 16),
        shows="without waiting at the cluster's barrier",
    ),
    Bug(
        "the wrong half given away",
        "(upper ? second : first) +",
        "(upper ? first : second) +",
        4,
        16,
    ),
    Bug(
        "alignment taken for granted",
        "width % WIDTH<T> == 0 && is_aligned(matrix)",
        "true",
        *(1, 17),
        shows="not aligned",
    ),
    Bug(
        "a barrier that half of the threads reach",
        "  __syncthreads();\n  expand_slice",
        "  if (threadIdx.x < 128) __syncthreads();\n  expand_slice",
        *(1, 16),
        shows="wait for threads that never come",
    ),
    Bug(
        "a thread that leaves early",
        "  const int row0 = blockIdx.y * Rows;\n",
        "  const int row0 = blockIdx.y * Rows;\n  if (threadIdx.x == 7) return;\n",
        *(1, 16),
        shows="wait for threads that never come",
    ),
    Bug(
        "two barriers taken for one",
        "  cluster_arrive();  // said early",
        "  if (threadIdx.x < 32) __syncthreads();\n  cluster_arrive();  // said early",
        *(1, 16),
        shows="threads wait for each other in lines",
    ),
    Bug(
        "parts read before they are there, on tensor cores",
        "  cluster_arrive();\n  cluster_wait();\n  const auto keep",
        "  const auto keep",
        *(17, 16),
    ),
    Bug(
        "t used before all have added it",
        "  __syncthreads();\n  const SharedT t",
        "  const SharedT t",
        *(17, 16),
    ),
    Bug(
        "warps that share a step take the same k",
        "warp / turns * STEP}",
        "0}",
        *(17, 16),
        k=1100,
    ),
    Bug(
        "columns of another warp",
        "(TURNS<Rows> * pair + turn) * 16",
        "(TURNS<Rows> * pair + turn / 2 * 2) * 16",
        *(17, 64),
    ),
    Bug(
        "a stage overwritten while warps read it",
        "i % STAGES",
        "i % (STAGES - 1)",
        *(17, 16),
        k=4100,
    ),
    Bug("the scale dropped", "block.scale[place.row + row_of_part(part)] * ", "", 17, 16),
    Bug(
        "the low part of t dropped",
        "rest == rest ? rest : 0.0f",
        "0.0f",
        *(17, 16),
    ),
    Bug(
        "rows of x below m read",
        "row0 + row < group.m ? at_least",
        "row < group.m ? at_least",
        *(17, 16),
        shows="a read outside the buffers",
    ),
    Bug(
        "the rest of a last strip stored as t",
        "if (column % WIDTH<T> >= strip.valid) continue;",
        "",
        *(17, 3),
    ),
    Bug(
        "each CTA expands the first tiles",
        "tile_of_b(group, tile), t",
        "tile_of_b(group, tile - tiles.first), t",
        *(17, 16),
    ),
    Bug(
        "sums written before all have spread theirs",
        "  spread<Rows>(sums, sum, place);\n  __syncthreads();\n",
        "  spread<Rows>(sums, sum, place);\n",
        *(17, 16),
    ),
    Bug(
        "a tile multiplied with part of the one before",
        "    wait_for_copies<0>();\n    __syncthreads();\n",
        "    wait_for_copies<0>();\n",
        *(17, 16, FEW_SMS),
        n=1200,
    ),
    Bug(
        "more shared memory than was asked for",
        "float* scratch = t + Rows * group.columns;",
        "float* scratch = t + 2 * Rows * group.columns;",
        *(1, 128),
        shows="shared memory",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    text = kernel_text()
    assert bug.old in text
    call = make_call(bug.m, bug.k, [(bug.n, bug.rank)], "float16")
    launches = plan_launches(call.shape, bug.chip)
    library = build(text.replace(bug.old, bug.new), [launch.kernel for launch in launches])
    found = [""]
    while bug.shows not in found[-1] and len(found) <= ORDERS:
        found.append(outcome(call, launches, library, order=len(found)))
    assert bug.shows in found[-1], found


def outcome(call: Call, launches: tuple[Launch, ...], library: CDLL, *, order: int) -> str:
    """What the emulation says, or what is wrong with the values."""
    nbytes = workspace_bytes(call.shape)
    try:
        out = run(
            call.shape,
            call.arrays,
            launches,
            workspace_bytes=nbytes,
            order=order,
            library=library,
        )
    except EmulationError as error:
        return str(error)
    return "wrong values" if call.worst(out) > 1 else "nothing"
