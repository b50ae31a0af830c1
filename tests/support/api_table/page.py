"""The pages made of the rows: `PYTHONPATH=tests python -m support.api_table.page`.

docs/api-table.md as a whole, and the table at the end of each docs/coming-from-*.md.
"""

from collections import Counter
from pathlib import Path

from support.api_table.edgellm import EDGELLM
from support.api_table.max import MAX
from support.api_table.peft import PEFT
from support.api_table.rows import Document, Row, State
from support.api_table.trtllm import TRTLLM
from support.api_table.vllm_api import VLLM_API
from support.api_table.vllm_llm import VLLM_LLM
from support.api_table.vllm_sampling import sampling_table
from support.api_table.vllm_structures import VLLM_STRUCTURES
from support.doc_blocks import ROOT

DOCUMENTS = (EDGELLM, MAX, VLLM_STRUCTURES, VLLM_API, VLLM_LLM, TRTLLM, PEFT)
PAGE = ROOT / "docs" / "api-table.md"
STATES: tuple[State, ...] = ("present", "different")

COMING_FROM: dict[str, tuple[Document, ...]] = {
    "peft": (PEFT,),
    "tensorrt-llm": (TRTLLM,),
    "edge-llm": (EDGELLM,),
    "vllm": (VLLM_LLM, VLLM_API, VLLM_STRUCTURES),
    "max": (MAX,),
}
_TABLE = "\n## Member by member\n"  # what is above is written by hand
_SAMPLING = "\n## SamplingParams, field by field\n"  # of vLLM's page, above the other table

_HEAD = """\
# The interfaces of other LoRA managers, member by member

Made from `tests/support/api_table`, whose tests check that every member of ours and every test
named here exists. *present*: does what its documentation says (methods of C++ in snake case);
*different*: the need is met in another way, for the reason given. There is no third state.
Paths are below `trt_lora`, tests below `tests/`.

vLLM's two pages are a third party's reading of it; where they have names that never existed there
(error codes, extra vocabulary), the need is served.
"""


def page() -> str:
    """Return the page."""
    lines = [
        _HEAD,
        "| interface | members | present | different |",
        "|---|---|---|---|",
    ]
    lines += [_counted(document.title, document.rows) for document in DOCUMENTS]
    lines.append(_counted("all", [row for document in DOCUMENTS for row in document.rows]))
    for document in DOCUMENTS:
        lines += ["", f"## {document.title}", *_table(document)]
    return "\n".join(lines) + "\n"


def coming_from_page(path: Path) -> str:
    """Return the page of a peer: its head as it is, and the table."""
    documents = COMING_FROM[path.stem.removeprefix("coming-from-")]
    head = path.read_text(encoding="utf-8").partition(_TABLE)[0].partition(_SAMPLING)[0]
    if VLLM_API in documents:
        head = "\n".join([head + _SAMPLING, *sampling_table(), ""])
    rows = [row for document in documents for row in document.rows]
    same = sum(row.state == "present" for row in rows)
    lines = [
        head + _TABLE,
        f"{same} of {len(rows)} do what their documentation says; the others say what differs.",
        "[api-table.md](api-table.md) names the test of each.",
        "",
        "| there | here, below `trt_lora` | what differs, or what to know |",
        "|---|---|---|",
        *(f"| {row.documented} | {_code(row.ours)} | {_difference(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def coming_from_pages() -> list[Path]:
    """Return the pages of the peers."""
    return [ROOT / "docs" / f"coming-from-{peer}.md" for peer in COMING_FROM]


def _difference(row: Row) -> str:
    return f"*different:* {row.reason}" if row.state == "different" else row.reason


def _counted(title: str, rows: tuple[Row, ...] | list[Row]) -> str:
    counts = Counter(row.state for row in rows)
    return f"| {title} | {len(rows)} | {' | '.join(str(counts[s]) for s in STATES)} |"


def _table(document: Document) -> list[str]:
    head = ["", "| documented | state | ours | reason | test |", "|---|---|---|---|---|"]
    return head + [
        f"| {row.documented} | {row.state} | {_code(row.ours)} | {row.reason} | {_code(row.test)} |"
        for row in document.rows
    ]


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for path in coming_from_pages():
        path.write_text(coming_from_page(path), encoding="utf-8")
