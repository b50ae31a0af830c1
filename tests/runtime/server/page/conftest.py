"""The page in Chromium."""

from collections.abc import Iterator

import pytest
from support.chromium import Tab, chromium_program, chromium_tab
from support.page_in_browser import Page
from support.web_server import Web


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium_tab(chromium_program(), tmp_path_factory.mktemp("profile")) as made:
        made.show(1280, "light")
        yield made


@pytest.fixture
def page(tab: Tab, web: Web) -> Page:
    """The page of a server with adapters a and b."""
    return Page(tab, web).open()
