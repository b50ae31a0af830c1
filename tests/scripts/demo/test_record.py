"""The demo's picture: what was printed, and nothing that is loaded from elsewhere."""

import io
import re

import pytest
from rich.console import Console
from support.doc_blocks import ROOT

from trt_lora.scripts.demo.record import OUTPUT, recording


def made() -> str:
    console = Console(record=True, width=40, file=io.StringIO())
    console.print("Arr, matey! <&>", markup=False)
    return recording(console)


@pytest.mark.parametrize("svg", [made(), (ROOT / OUTPUT).read_text()], ids=["made", "kept"])
def test_a_recording_holds_the_text_and_loads_nothing(svg: str) -> None:
    assert "Arr," in svg.replace("&#160;", " ")
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in svg.replace("url(#", "")
