"""The rows of docs/api-table.md, and the tables of docs/coming-from-*.md that are made of them.

`PYTHONPATH=tests:src python -m support.api_table.page` writes those tables.
"""

from dataclasses import dataclass
from pathlib import Path

from support.api_table.vllm_sampling import sampling_table
from support.doc_blocks import ROOT

PAGE = ROOT / "docs" / "api-table.md"
STATES = ("present", "different")
# The peers' pages, and how the titles of their interfaces begin.
COMING_FROM = {
    "peft": ("PEFT",),
    "tensorrt-llm": ("TensorRT-LLM",),
    "edge-llm": ("TensorRT-Edge-LLM",),
    "vllm": ("vLLM `LLM`", "vLLM API", "vLLM data structures"),
    "max": ("MAX",),
}
_TABLE = "\n## Member by member\n"  # what is above is written by hand
_SAMPLING = "\n## SamplingParams, field by field\n"  # of vLLM's page, above the other table


@dataclass(frozen=True)
class Row:
    """A documented member: nothing is without a counterpart, so there is no third state."""

    documented: str
    state: str
    ours: str  # path below trt_lora, or a command and its option
    reason: str  # why it is not as documented, or what to know
    test: str  # file below tests/ and function


def tables() -> dict[str, list[list[str]]]:
    """Return the cells of every table of the page by its title; the first one has none."""
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## "):
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        found[title] = [[c.strip() for c in line[1:-1].split(" | ")] for line in lines[2:]]
    return found


def documents() -> dict[str, list[Row]]:
    """Return the rows of every interface by its title."""
    _, *sections = tables().items()
    return {title: [_row(*cells) for cells in rows] for title, rows in sections}


def _row(documented: str, state: str, ours: str, reason: str, test: str) -> Row:
    return Row(documented, state, ours.strip("`"), reason, test.strip("`"))


def counted(documents: dict[str, list[Row]]) -> list[list[str]]:
    """Return the table of the number of rows, of each state and in all."""
    rows = documents | {"all": [row for found in documents.values() for row in found]}
    return [
        [title, str(len(found)), *(str(sum(row.state == s for row in found)) for s in STATES)]
        for title, found in rows.items()
    ]


def coming_from_page(path: Path) -> str:
    """Return the page of a peer: its head as it is, and the table."""
    starts = COMING_FROM[path.stem.removeprefix("coming-from-")]
    found = documents()
    rows = [row for s in starts for title in found if title.startswith(s) for row in found[title]]
    head = path.read_text(encoding="utf-8").partition(_TABLE)[0].partition(_SAMPLING)[0]
    if path.stem.endswith("vllm"):
        head = "\n".join([head + _SAMPLING, *sampling_table(), ""])
    same = sum(row.state == "present" for row in rows)
    lines = [
        head + _TABLE,
        f"{same} of {len(rows)} do what their documentation says; the others say what differs.",
        "[api-table.md](api-table.md) names the test of each.",
        "",
        "| there | here, below `trt_lora` | what differs, or what to know |",
        "|---|---|---|",
        *(f"| {row.documented} | `{row.ours}` | {_difference(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def coming_from_pages() -> list[Path]:
    """Return the pages of the peers."""
    return [ROOT / "docs" / f"coming-from-{peer}.md" for peer in COMING_FROM]


def _difference(row: Row) -> str:
    return f"*different:* {row.reason}" if row.state == "different" else row.reason


if __name__ == "__main__":
    for path in coming_from_pages():
        path.write_text(coming_from_page(path), encoding="utf-8")
