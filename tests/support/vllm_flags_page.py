"""docs/vllm-flags.md: its head as it is, and the table that `serve` goes by.

`PYTHONPATH=tests:src python -m support.vllm_flags_page` writes it.
"""

from support.doc_blocks import ROOT

from trt_lora.scripts.commands.vllm_flags import table

PAGE = ROOT / "docs" / "vllm-flags.md"


def page() -> str:
    """Return the page."""
    head = PAGE.read_text(encoding="utf-8").partition("\n| ")[0]
    return f"{head.rstrip()}\n\n{table()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
