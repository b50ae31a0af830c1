"""docs/api-table.md, made of the rows: `PYTHONPATH=tests python -m support.api_table.page`."""

from collections import Counter

from support.api_table.edgellm import EDGELLM
from support.api_table.max import MAX
from support.api_table.rows import Document, Row, State
from support.api_table.trtllm import TRTLLM
from support.api_table.vllm_api import VLLM_API
from support.api_table.vllm_structures import VLLM_STRUCTURES
from support.doc_blocks import ROOT

DOCUMENTS = (EDGELLM, MAX, VLLM_STRUCTURES, VLLM_API, TRTLLM)
PAGE = ROOT / "docs" / "api-table.md"
STATES: tuple[State, ...] = ("present", "different", "absent")

_HEAD = """\
# The interfaces of other LoRA managers, member by member

Made from `tests/support/api_table`, whose tests check that every member of ours and every test
named here exists. *present*: does what its documentation says (methods of C++ in snake case);
*different*: the need is met in another way, for the reason given; *absent*: it is not there.
Paths are below `trt_lora`, tests below `tests/`.

vLLM's two pages are a third party's reading of it; where they have names that never existed there
(error codes, extra vocabulary), the need is served.
"""


def page() -> str:
    """Return the page."""
    lines = [
        _HEAD,
        "| interface | members | present | different | absent |",
        "|---|---|---|---|---|",
    ]
    lines += [_counted(document.title, document.rows) for document in DOCUMENTS]
    lines.append(_counted("all", [row for document in DOCUMENTS for row in document.rows]))
    for document in DOCUMENTS:
        lines += ["", f"## {document.title}", *_table(document)]
    return "\n".join(lines) + "\n"


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
