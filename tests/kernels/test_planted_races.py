"""Each barrier of the kernels, taken out of their text: the emulation finds a race."""

import re
from collections import Counter
from dataclasses import dataclass

import pytest
from kernels.calls import Call, make_call
from kernels.changed_kernels import outcome
from kernels.emulator import compiler, kernel_text
from kernels.slot_calls import slot_call

from trt_lora.plugins.kernels.launch_plan import Chip

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

FEW_SMS = Chip((9, 0), 8)  # as many as a cluster has CTAs


def one_site(m: int, k: int, rank: int, dtype: str) -> Call:
    return make_call(m, k, [(136, rank)], dtype)


# A call that races where the function lacks any of its barriers.
RACES_WITHOUT = {
    "shrink_column_tile": one_site(1, 136, 16, "float32"),
    "fused": one_site(1, 136, 100, "float32"),  # two column tiles
    "save_parts": one_site(1, 136, 136, "float16"),
    "expand": one_site(1, 136, 136, "float16"),
    "shrink_tile": one_site(33, 1100, 16, "float16"),  # more steps than stages
    "expand_tile": one_site(33, 136, 128, "float16"),  # two blocks
    "shrink_few_rows": one_site(33, 136, 16, "float16"),
    # The same CTA has a tile of a site with a rank, then one of a site without.
    "fused_tiles": slot_call([0] * 33, 136, [(1096, 16), (136, 16)], [(16, 0)], "float16"),
    "shrink_rank_tile": one_site(3, 8456, 16, "float16"),  # more chunks than are under way at once
    "decode": one_site(3, 136, 16, "float16"),
}
RACES = ("a race of", "a CTA leaves while", "a CTA that has left")
_FUNCTION = re.compile(r"^(?:template .*>)?\s*DEVICE \S+ (\w+)\(", re.MULTILINE)
_BARRIER = re.compile(r"__syncthreads\(\);|cluster_arrive(?:_relaxed)?\(\);|cluster_wait\(\);")


@dataclass(frozen=True)
class Barrier:
    """The statements of one barrier: of a cluster's, the arrival and the wait."""

    function: str
    statements: tuple[int, ...]  # their numbers in any text of the kernels

    def removed(self, text: str) -> str:
        """The text with empty statements in its place, line for line."""
        places = [found.span() for found in _BARRIER.finditer(text)]
        for start, end in (places[number] for number in reversed(self.statements)):
            text = f"{text[:start]};{text[end:]}"
        return text


def barriers() -> list[Barrier]:
    """Every barrier of the kernels, in order."""
    text = kernel_text()
    found: list[Barrier] = []
    arrival: list[int] = []
    for number, statement in enumerate(_BARRIER.finditer(text)):
        if "arrive" in statement[0]:
            arrival = [number]
            continue
        function = _FUNCTION.findall(text[: statement.start()])[-1]
        before = arrival if "wait" in statement[0] else []
        found.append(Barrier(function, (*before, number)))
    return found


@pytest.mark.parametrize("barrier", barriers(), ids=lambda each: each.function)
def test_a_race_is_found_without_any_one_barrier(barrier: Barrier) -> None:
    call = RACES_WITHOUT[barrier.function]
    text = kernel_text(has_slots=call.shape.stacks is not None)
    said = outcome(call, FEW_SMS, barrier.removed(text))
    assert any(race in said for race in RACES), said


def test_every_barrier_is_taken_out_once() -> None:
    assert Counter(each.function for each in barriers()) == {
        "shrink_column_tile": 1,
        "fused": 4,
        "save_parts": 2,
        "expand": 1,
        "shrink_tile": 2,
        "expand_tile": 3,
        "shrink_few_rows": 1,
        "fused_tiles": 4,
        "shrink_rank_tile": 2,
        "decode": 4,
    }
