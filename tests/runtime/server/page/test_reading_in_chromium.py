"""The page is for everybody: without a mouse, without eyes, on a phone and by night."""

from typing import Any

import pytest
from support.page_in_browser import REACHABLE, Page
from support.readable import CONTRAST, SMALLEST, WIDEST

# Roles that a screen reader announces by their name.
NAMED = {
    *(
        "button",
        "checkbox",
        "textbox",
        "spinbutton",
        "slider",
        "combobox",
        "link",
        "image",
        "meter",
    ),
    *("region", "log", "navigation", "DisclosureTriangle", "form"),
}
# What has the focus, as its place among all elements; the body is -1.
PLACE = "[...document.body.querySelectorAll('*')].indexOf(document.activeElement)"
# The places of all that can be used.
PLACES = f"""[...document.body.querySelectorAll('*')].map((e, place) => [e, place])
  .filter(([e]) => e.matches(`{REACHABLE}`) && e.checkVisibility() && !e.disabled)
  .map(([, place]) => place)"""


@pytest.fixture
def full(page: Page) -> Page:
    """The page with all that it can show: two answers, a blend, keys, an error."""
    page.click("[name=compare]")
    page.choose(0, "a")
    page.click(".add")
    page.choose(1, "b")
    page.choose(2, "b")
    page.click("summary")
    page.fill("[name=max_tokens]", "8")
    page.send("w5 " + "w" * 300)
    assert page.shows(lambda: len(page.texts(".answer")) == 2 and page.is_idle())
    page.click("#load button")
    page.tab.evaluate("document.querySelector('#trouble').hidden = false")
    page.tab.evaluate("document.querySelector('#trouble').textContent = 'x'.repeat(200)")
    page.click("#pause")
    return page


def test_the_tab_key_reaches_all_that_can_be_used_in_the_order_of_the_page(full: Page) -> None:
    full.tab.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    full.tab.evaluate("document.body.tabIndex = -1; document.body.focus()")
    expected = full.tab.evaluate(PLACES)
    assert len(expected) > 30
    found = []
    for _ in expected:
        full.tab.press("Tab")
        found.append(full.tab.evaluate(PLACE))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert full.tab.evaluate(outline) != "none"
    assert found == expected


def test_the_first_key_leads_to_the_prompt(page: Page) -> None:
    page.tab.press("Tab")
    assert page.tab.evaluate("document.activeElement.textContent") == "To the prompt"
    page.tab.press("Enter", "\r")
    page.tab.write("w1")
    assert page.tab.evaluate("document.querySelector('#prompt').value") == "w1"


def test_a_screen_reader_has_a_name_for_all_that_it_meets(full: Page) -> None:
    full.tab.call("Accessibility.enable")
    nodes = full.tab.call("Accessibility.getFullAXTree")["nodes"]
    met = [n for n in nodes if not n["ignored"] and n["role"]["value"] in NAMED]
    assert {role(n) for n in met} == NAMED
    assert [n for n in met if not name(n)] == []
    for kind in ("combobox", "slider", "button"):
        names = [(name(n), n.get("parentId")) for n in met if role(n) == kind]
        assert len(set(names)) == len(names), kind
    headings = [name(n) for n in nodes if not n["ignored"] and role(n) == "heading"]
    assert headings == ["trt-lora", "Chat", "Adapters", "Requests"]
    assert {name(n) for n in nodes if role(n) == "group"} >= {
        *("First: model 1", "First: model 2", "Second: model 1"),
    }
    full.tab.call("Accessibility.disable")


def role(node: dict[str, Any]) -> str:
    return str(node.get("role", {}).get("value"))


def name(node: dict[str, Any]) -> str:
    return str(node.get("name", {}).get("value", "")).strip()


def test_it_is_readable_at_any_width_and_hour(full: Page) -> None:
    backgrounds = {
        (width, scheme): look(full, width, scheme)
        for width in (1280, 768, 390)
        for scheme in ("light", "dark")
    }
    full.tab.show(1280, "light")
    assert len({background for (_, scheme), background in backgrounds.items()}) == 2
    assert backgrounds[390, "dark"] == backgrounds[1280, "dark"] != backgrounds[390, "light"]


def look(page: Page, width: int, scheme: str) -> str:
    """Check that the page is readable, and return its background."""
    page.tab.show(width, scheme)
    assert page.tab.evaluate("innerWidth") == width
    assert page.tab.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.tab.evaluate(WIDEST) <= width
    assert page.tab.evaluate(SMALLEST) >= 12
    assert page.tab.evaluate(CONTRAST) >= 4.5  # WCAG AA
    background: str = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return background
