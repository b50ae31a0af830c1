"""Launches at real sizes on real GPUs, against a table that is kept: what changes is seen.

python tests/plugins/kernels/test_grids.py      writes the table anew
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.passes import launches_of

TABLE = Path(__file__).with_name("grids.txt")
RANK, SLOTS = 16, 8
GROUPS = {  # k, and the n of linears that read one x: q, k, v; o; gate, up; down
    "Llama-3-8B": ((4096, 4096, 1024, 1024), (4096, 4096), (4096, 14336, 14336), (14336, 4096)),
    "Llama-3-70B": ((8192, 8192, 1024, 1024), (8192, 8192), (8192, 28672, 28672), (28672, 8192)),
    "Qwen3-0.6B": ((1024, 2048, 1024, 1024), (2048, 1024), (1024, 3072, 3072), (3072, 1024)),
}
CHIPS = {
    "A100": Chip((8, 0), 108),
    "RTX A6000": Chip((8, 6), 84),
    "L40S": Chip((8, 9), 142),
    "H100": Chip((9, 0), 132),
    "RTX 5090": Chip((12, 0), 170),
}
ROWS = (1, 8, 32, 64)


def lines() -> Iterator[str]:
    """A line for each model, group, GPU and number of rows: with one adapter, and with slots."""
    for model, groups in GROUPS.items():
        for k, *widths in groups:
            stacks = StackShape(SLOTS, 224, tuple(range(len(widths))))
            for name, chip in CHIPS.items():
                for rows in ROWS:
                    sites = tuple(SiteShape(n, RANK) for n in widths)
                    each = (
                        GroupShape(rows, k, sites, "float16", True, given)
                        for given in (None, stacks)
                    )
                    found = "; ".join(_launches(shape, chip) for shape in each)
                    yield f"{model}, {k} x {'+'.join(map(str, widths))}, {name}, {rows}: {found}"


def _launches(shape: GroupShape, chip: Chip) -> str:
    """Kernels with their grids, and how many CTAs come to a multiprocessor."""
    return " ".join(
        f"{each.kernel} {'x'.join(map(str, each.grid))}"
        f" ({each.grid[0] * each.grid[1] * each.grid[2] / chip.multiprocessors:.2f})"
        for each in launches_of(shape, chip)
    )


@pytest.mark.parametrize("model", GROUPS)
def test_launches_at_real_sizes_are_those_of_the_table(model: str) -> None:
    kept = [line for line in TABLE.read_text().splitlines() if line.startswith(f"{model},")]
    assert [line for line in lines() if line.startswith(f"{model},")] == kept
    assert len(kept) == 4 * len(CHIPS) * len(ROWS)


if __name__ == "__main__":
    TABLE.write_text("".join(f"{line}\n" for line in lines()))
