"""The pages as a site, in a browser: code is whole on a screen of 1,280 pixels, and names are."""

from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from support.chromium import chromium_program, chromium_tab
from support.doc_blocks import ROOT

# Blocks of code that are wider than their column.
CUT = """
[...document.querySelectorAll('pre > code')]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 60))
"""
# Names in tables that are drawn in more than one line.
BROKEN = """
[...document.querySelectorAll('table code')]
  .filter(e => e.getClientRects().length > 1).map(e => e.textContent)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), use_directory_urls=False))
    return folder


def test_the_first_page_says_what_it_is_with_a_picture_and_the_first_command(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    what, command, picture = map(page.index, ("One base model", "make demo", "images/demo.svg"))
    assert what < command < picture
    for part in ('data-md-color-scheme="slate"', "content.code.copy", "github.com/trt-lora"):
        assert part in page


@pytest.mark.slow
def test_code_and_names_in_tables_are_whole_on_a_screen_of_1280_pixels(
    site: Path, tmp_path: Path
) -> None:
    with chromium_tab(chromium_program(), tmp_path / "profile") as tab:
        tab.show(1280, "light")
        for page in sorted(site.rglob("*.html")):
            tab.open(page)
            assert tab.evaluate(CUT) == [], page.name
            assert tab.evaluate(BROKEN) == [], page.name
