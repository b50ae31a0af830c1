"""The path model: its numbers are those that the design was made with, and those of the docs."""

from collections.abc import Callable, Iterator

import pytest

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import plan_launches
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.__main__ import FOLDER
from trt_lora.scripts.bench.gpu import predictions
from trt_lora.scripts.bench.gpu.kernels import cells
from trt_lora.scripts.bench.gpu.path_model import GPUS, call_us
from trt_lora.scripts.bench.llama import LLAMA_3_8B


def shape_of(group: str, rows: int, rank: int = 16, slots: int = 0) -> GroupShape:
    linears = LLAMA_3_8B.groups[group]
    sites = tuple(SiteShape(linear.n, rank) for linear in linears)
    stacks = StackShape(slots, len(sites), tuple(range(len(sites)))) if slots else None
    return GroupShape(rows, linears[0].k, sites, "float16", len(sites) == 1, stacks)


@pytest.mark.parametrize(
    "table", [predictions.step_table, predictions.alone_table, predictions.idle_table]
)
def test_the_tables_of_the_page_are_what_the_model_says(
    table: Callable[[], Iterator[str]],
) -> None:
    assert "\n".join(table()) in (FOLDER / "kernels.md").read_text()


@pytest.mark.parametrize(
    ("group", "us"), [("qkv", 2.25), ("o", 1.78), ("gate_up", 1.78), ("down", 2.25)]
)
def test_a_decode_kernel_of_an_h100_takes_what_was_counted(group: str, us: float) -> None:
    """Counted by hand, of instructions and waits; without the node of the graph."""
    gpu, shape = GPUS["H100"], shape_of(group, 1)
    found = call_us(shape, plan_launches(shape, gpu.chip), gpu) - gpu.ceilings.node_us
    assert found == pytest.approx(us, rel=0.2)


def test_every_call_that_is_measured_has_a_prediction() -> None:
    for gpu in GPUS.values():
        for cell in cells():
            shape = shape_of(cell.group, cell.m, cell.rank, 8 if cell.has_slots else 0)
            for aligned in (True, False):
                launches = launches_of(shape, gpu.chip, aligned=aligned)
                assert call_us(shape, launches, gpu) > len(launches) * gpu.ceilings.node_us


def test_more_rows_ranks_and_adapters_take_no_less() -> None:
    gpu = GPUS["H100"]
    for group in LLAMA_3_8B.groups:
        plans = [shape_of(group, rows) for rows in (1, 8, 16, 32, 64)]
        times = [call_us(each, plan_launches(each, gpu.chip), gpu) for each in plans]
        assert times == sorted(times)
        many = shape_of(group, 8, slots=8)
        one, eight = (
            call_us(many, launches_of(many, gpu.chip), gpu, slots=slots) for slots in (1, 8)
        )
        assert one < eight
