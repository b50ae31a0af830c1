"""Bugs that such kernels have, planted in their text: the emulation, or the bound, shows each."""

from dataclasses import dataclass

import pytest
from emulation.cases import make_call
from emulation.emulator import EmulationError, build, compiler, kernel_text, run

from trt_lora.plugins.launch import Chip, plan_launches, workspace_bytes

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

A100, H200 = Chip((8, 0), 108), Chip((9, 0), 132)


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
    nbytes = workspace_bytes(call.shape)
    found = set()
    for order in range(4):
        try:
            out = run(
                call.shape,
                call.arrays,
                launches,
                workspace_bytes=nbytes,
                order=order,
                library=library,
            )
            found.add("wrong values" if call.worst(out) > 1 else "nothing")
        except EmulationError as error:
            found.add(str(error))
    assert any(bug.shows in each for each in found), found
