"""Bugs that passes over slots have, planted in their text; emulation or bound shows each."""

from dataclasses import dataclass

import pytest
from kernels.emulator import EmulationError, build, compiler, kernel_text, run
from kernels.slot_calls import SlotCall, slot_call, with_passes_at_once

from trt_lora.plugins.contract.slots import BASE_SLOT as BASE
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.passes import launches_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

H200 = Chip((9, 0), 132)
VALUES = "wrong values"


@dataclass(frozen=True)
class Bug:
    """A change of the text, and a number of rows whose kernels it spoils."""

    name: str
    old: str
    new: str
    shows: str = VALUES  # or what the emulation says
    rows: int = 5
    dtype: str = "float16"


BUGS = (
    Bug(
        "rows of another slot in a pass",
        "next = {found, 0};",
        "next = {found, next.taken};",
        rows=40,
    ),
    Bug(
        "rows of other slots written",
        "return HAS_SLOTS ? taken >> row & 1 : row < count;",
        "return row < count;",
        rows=40,
    ),
    Bug(
        "rows of other slots written in a decode step",
        "if (HAS_SLOTS) return unsigned(group.taken);",
        "",
    ),
    Bug(
        "the rows of the first CTAs again",
        "first_row<Tiles>(), ROW_TILE",
        "0, ROW_TILE",
        "a read outside the buffers",
        rows=20,
    ),
    Bug("no pass for the base model", "rows, BASE - 1);", "rows, BASE);", rows=40),
    Bug(
        "what is no slot taken for one",
        "unsigned(slot) < unsigned(group.stacks.slots) ? slot : BASE",
        "slot < 0 ? BASE : slot",
        "a read outside the buffers",
    ),
    Bug("the A of the first slot", "in_slot<T>(own.a, slot,", "in_slot<T>(own.a, 0,"),
    Bug("the B of the first slot", "in_slot<T>(own.b, slot,", "in_slot<T>(own.b, 0,"),
    Bug("slots as long as A of another rank", "group.k, own.stride);", "group.k, group.m);"),
    Bug(
        "the ranks of the first sites",
        "group.stacks.sites) + of.of_ranks",
        "group.stacks.sites) + site",
    ),
    Bug(
        "the ranks of the first slot",
        "offset(slot, group.stacks.sites)",
        "offset(0, group.stacks.sites)",
    ),
    Bug("work for what pads a rank", "own.rank = rank_in_slot(group, slot, site);", ""),
    Bug(
        "rows of A as long as the adapter's rank",
        "HAS_SLOTS ? site.stride : site.rank",
        "site.rank",
    ),
    Bug(
        "each site's t in the same columns",
        "pass.site[s].column = column;",
        "pass.site[s].column = 0;",
        "a race",
        rows=40,
    ),
    Bug(
        "each site's t in the same rank tiles",
        "pass.site[s].rank_tile = rank_tile;",
        "pass.site[s].rank_tile = 0;",
    ),
    Bug(
        "the passes of one CTA alone",
        "turn % int(gridDim.z) == blockIdx.z",
        "turn == blockIdx.z",
        rows=40,
    ),
    Bug(
        "the first pass of each cluster alone in a decode step",
        "turn += clusters) {",
        "turn += 64) {",
    ),
    Bug("the rows of the lane's own slot", "unsigned(of_lane(int(same), lane))", "same"),
    Bug("rows that are not there lead a pass", "there && !(same &", "!(same &", "a read outside"),
    Bug(
        "a pass read before it is written in a decode step",
        "    __syncthreads();\n    decode<T, Tiles>(pass, of",
        "    decode<T, Tiles>(pass, of",
        "a race",
    ),
    Bug(
        "a pass of a decode step written while others read the one before",
        "      cluster_arrive();\n      cluster_wait();\n    }\n    write_pass",
        "    }\n    write_pass",
        "a race",
    ),
    Bug(
        "a pass read before it is written",
        "      __syncthreads();\n      compute(pass);",
        "      compute(pass);",
        "a race",
        dtype="float32",
    ),
    Bug(
        "a pass written while others read the one before",
        "        cluster_arrive();\n        cluster_wait();\n      }\n      is_first",
        "      }\n      is_first",
        "a race",
        rows=40,
    ),
    Bug(
        "a cluster that does not wait for its other CTAs",
        "        cluster_arrive();\n        cluster_wait();\n      }\n      is_first",
        "        __syncthreads();\n      }\n      is_first",
        "a race",
        rows=40,
    ),
    Bug(
        "sums of t that lie as in this pass alone",
        "HAS_SLOTS ? group.stacks.columns : group.total_rank",
        "group.total_rank",
        rows=70,
    ),
    Bug(
        "sums of t of rows of other slots",
        "if (!HAS_SLOTS || taken.has(row)) write(",
        "write(",
        rows=70,
    ),
    Bug("half of a warp's rows looked at", "taken >> row & 0xFFFF", "taken >> row & 0xFF", rows=40),
    Bug(
        "tiles of the adapter's columns",
        "HAS_SLOTS ? group.stacks.column_tiles : own_tiles",
        "at_least(own_tiles, 1)",
        "a read outside the buffers",
        rows=70,
    ),
    Bug(
        "a pass in the memory of its tile",
        "shared_memory() + (HAS_SLOTS ? PASS_BYTES : 0)",
        "shared_memory()",
        "a race",
    ),
    Bug("64 rows as 32", "next.taken |= 1ull << i;", "next.taken |= 1u << i;", rows=70),
)


def call_of(rows: int, dtype: str) -> SlotCall:
    """Rows of every slot, of the base model and of none; a slot is in a tile's last rows alone."""
    slot = [(1, 0, 3 if row % 16 >= 8 else 2, BASE, 9)[row % 5] for row in range(rows)]
    ranks = [(16, 8), (3, 16), (16, 8), (64, 1)]
    return slot_call(slot, 136, [(136, 256 if rows > 64 else 64), (40, 16)], ranks, dtype)


def outcome(call: SlotCall, text: str) -> str:
    """What the emulation says of changed kernels, or what is wrong with the values."""
    launches = launches_of(call.shape, H200)
    library = build(text, [launch.kernel for launch in launches])
    try:
        out = run(call, with_passes_at_once(launches, 2), library=library)
    except EmulationError as error:
        return str(error)
    return VALUES if call.worst(out) > 1 else "nothing"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    text = kernel_text(has_slots=True)
    assert text.count(bug.old) == 1
    assert bug.shows in outcome(call_of(bug.rows, bug.dtype), text.replace(bug.old, bug.new))


@pytest.mark.parametrize("rows", [3, 20, 70])
def test_nothing_is_found_without_a_bug(rows: int) -> None:
    assert outcome(call_of(rows, "float16"), kernel_text(has_slots=True)) == "nothing"
