"""The page in Chromium."""

from collections.abc import Iterator

import pytest
from support.chromium import Tab, chromium_program, chromium_tab
from support.page_in_browser import Page
from support.web_server import Web

# A page that looks ten times as often, and says how often it was about to.
HASTE = """
const later = setTimeout;
window.timers = 0;
window.setTimeout = (act, ms) => later(() => { timers++; act(); }, ms / 10);
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium_tab(chromium_program(), tmp_path_factory.mktemp("profile")) as made:
        made.show(1280, "light")
        made.call("Page.addScriptToEvaluateOnNewDocument", source=HASTE)
        yield made


@pytest.fixture
def page(tab: Tab, web: Web) -> Page:
    """The page of a server with adapters a and b."""
    return Page(tab, web).open()
