"""What the page shows of the engine, and how adapters are changed from it."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.adapter_routes import names
from support.chromium import Tab
from support.page_in_browser import Page
from support.served_engines import Gated, MakeGated, Spoken
from support.web_server import CHATS, COMPLETIONS, Web, web_server

from trt_lora.runtime.server.guard import GuardConfig

ROWS = "#adapter-rows tr"
CELLS = (
    """[...document.querySelectorAll('%s tr')].map(row => [...row.cells].map(c => c.innerText))"""
)


def table(page: Page, body: str) -> list[list[str]]:
    """The cells of a table by its rows."""
    found: list[list[str]] = page.tab.evaluate(CELLS % body)
    return found


@contextmanager
def streams(gated: Gated, *models: str) -> Iterator[None]:
    """Answers that have begun, one after the other."""
    with ExitStack() as open_:
        for model in models:
            body = {"prompt": [1, 2], "model": model, "stream": True, "max_tokens": 20}
            open_.enter_context(gated.web.client.stream("POST", COMPLETIONS, json=body))
        yield


def test_the_tables_tell_slots_leases_rows_and_what_is_waited_for(
    make_gated: MakeGated, tab: Tab
) -> None:
    gated = make_gated(rows=2)
    for name in "12":
        gated.web.answer(COMPLETIONS, prompt=[1, 2], model=name, max_tokens=1)
    gated.web.post("/v1/lora_adapters/1/pin")
    gated.engine.shut()
    with streams(gated, "1", "2", "3"):
        gated.engine.let(4)
        page = Page(tab, gated.web).open()
        assert page.text("#slots") == "2 of 2 slots are in use."
        found = table(page, "#adapter-rows")
        known = gated.web.client.get("/v1/lora_adapters").json()["data"]
        told = {item["name"]: item for item in known}
        for slot, name, generation, rank, nbytes, level, leases, pinned, _ in found:
            item = told[name]
            assert (slot, level) == (
                str("-" if item["slot"] is None else item["slot"]),
                item["level"],
            )
            assert (generation, rank) == (str(item["version"]), str(item["rank"] or "-"))
            assert (leases, pinned) == (str(item["leases"]), "yes" if item["pinned"] else "no")
            assert float(nbytes) == pytest.approx(item["bytes"] / 1e6, abs=0.05)
        assert [row[1] for row in found] == ["1", "2", "3"]
        assert [row[5] for row in found] == ["slot", "slot", "memory"]
        assert [row[7] for row in found] == ["yes", "no", "no"]
        assert table(page, "#queue-rows") == [
            ["base, and blends", "0", "0", "-"],
            ["1", "1", "0", "-"],
            ["2", "1", "0", "-"],
            ["3", "0", "1", "a slot"],
        ]
        assert page.text("#rows-text") == "2 (100 %)"
        assert tab.evaluate("document.querySelector('#rows').value") == 1
        gated.engine.let()
    assert page.shows(lambda: page.text("#rows-text") == "0 (0 %)")  # it looks again by itself
    assert table(page, "#queue-rows") == [["base, and blends", "0", "0", "-"]]


def test_the_lines_tell_first_tokens_and_gaps_as_they_come(page: Page) -> None:
    assert page.text("#gap p") == "no token yet"
    assert not is_drawn(page, "#first")
    page.web.answer(COMPLETIONS, prompt=[1, 2], max_tokens=8, ignore_eos=True)
    for chart in ("#first", "#gap"):
        assert page.shows(partial(is_drawn, page, chart))
        assert "last: mean " in page.text(f"{chart} p")
        label = page.tab.evaluate(f"document.querySelector('{chart} svg').ariaLabel")
        assert label.endswith(page.text(f"{chart} p"))


def is_drawn(page: Page, chart: str) -> bool:
    """Whether both lines of a chart have a point."""
    paths = f"[...document.querySelectorAll('{chart} path')].map(e => e.getAttribute('d'))"
    return all(page.tab.evaluate(paths))


def test_what_is_paused_is_not_asked_for(page: Page) -> None:
    page.click("#pause")
    before, timers = len(page.requests("/metrics")), page.tab.evaluate("timers")
    assert page.shows(lambda: page.tab.evaluate("timers") > timers + 2)
    assert len(page.requests("/metrics")) == before
    page.click("#pause")
    assert page.shows(lambda: len(page.requests("/metrics")) > before)


METRICS = r"""
(async () => {
  const { between, histogram, named, parse, total } = await import("./page/metrics.js");
  const text = (counts, sum) => [0.1, 0.2, "+Inf"].map((le, place) =>
    `x_bucket{model="a,\\"b\\"",le="${le}"} ${counts[place]}`).join("\n")
    + `\nx_count{model="a"} ${counts[2]}\nx_sum{model="a"} ${sum}\n# HELP x\n\ny 3.0\ny{a="1"} 4`;
  const [before, after] = [text([1, 1, 1], 1), text([1, 101, 101], 16)].map(parse);
  return {
    total: total(before, "y"),
    label: named(before, "x_bucket")[0].labels.model,
    found: between(histogram(before, "x"), histogram(after, "x")),
    nothing: between(histogram(after, "x"), histogram(after, "x")),
    beyond: between(histogram(parse(""), "x"), histogram(parse(text([0, 0, 4], 40)), "x")),
  };
})()
"""


def test_metrics_are_summed_and_what_came_between_two_looks_is_told(page: Page) -> None:
    found = page.tab.evaluate(METRICS)
    assert (found["total"], found["label"], found["nothing"]) == (7, 'a,\\"b\\"', None)
    assert found["found"] == {"count": 100, "mean": 0.15, "p99": pytest.approx(0.199)}
    assert found["beyond"] == {"count": 4, "mean": 10, "p99": 0.2}  # the last bound there is


STREAM = r"""
(async () => {
  const { stream } = await import("./page/api.js");
  const bytes = new TextEncoder().encode(%s);
  const body = new ReadableStream({ start(to) {
    for (const byte of bytes) to.enqueue(new Uint8Array([byte]));
    to.close();
  }});
  const ask = window.fetch;
  window.fetch = async () => new Response(body);
  const found = [];
  try {
    for await (const event of stream("x", {}, null)) found.push(event.a);
  } catch (error) {
    found.push(error.message);
  }
  window.fetch = ask;
  return found;
})()
"""


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (
            'data: {"a": "é😀"}\\n\\n: keep-alive\\n\\ndata: {"a": 2}\\n\\ndata: [DONE]\\n\\n',
            ["é😀", 2],
        ),
        (
            'data: {"a": 1}\\n\\ndata: {"error": {"message": "gone", "code": 503}}\\n\\n',
            [1, "gone"],
        ),
        ('data: {"a": 1}\\n\\n', [1, "the answer has broken off"]),
    ],
)
def test_a_stream_is_read_in_whatever_pieces_it_comes_and_to_its_end(
    page: Page, sent: str, found: list[object]
) -> None:
    assert page.tab.evaluate(STREAM % f"'{sent}'") == found


def test_adapters_are_loaded_replaced_pinned_and_unloaded_from_the_page(
    page: Page, spoken: Spoken, place: Path
) -> None:
    path = place / "c"
    shutil.copytree(spoken.adapters["a"], path)
    page.fill("[name=lora_name]", "c")
    page.fill("[name=lora_path]", str(path))
    page.click("#load button")
    assert page.shows(lambda: page.text("#changed").startswith("c is loaded: generation "))
    assert page.shows(lambda: page.count(ROWS) == 3)
    assert page.shows(lambda: "c" in page.texts("option"))
    page.click("#load button")
    assert page.shows(lambda: "has already been loaded" in page.text("#changed"))
    page.click("[name=load_inplace]")
    page.click("#load button")
    assert page.shows(lambda: page.text("#changed").startswith("c is loaded: generation "))
    page.focus(f"{ROWS} button", 4)
    page.tab.press(" ", " ")
    assert page.shows(lambda: page.text("#changed") == "c is pinned")
    assert page.shows(lambda: page.texts(f"{ROWS} button")[4] == "Unpin")
    focused = "document.activeElement.ariaLabel"
    assert page.tab.evaluate(focused) == "Unpin c"  # a look does not take the focus away
    page.tab.press("Enter", "\r")
    assert page.shows(lambda: page.text("#changed") == "c is unpinned")
    page.tab.press("Tab")
    page.tab.press("Enter", "\r")
    assert page.tab.evaluate(focused) == "Really Unload c"
    assert "c" in names(page.web)
    page.tab.press("Enter", "\r")
    assert page.shows(lambda: page.text("#changed").startswith("c is unloaded, "))
    assert page.shows(lambda: page.count(ROWS) == 2)
    assert "c" not in names(page.web)


def test_a_button_that_unloads_forgets_a_first_press_when_it_is_left(page: Page) -> None:
    page.focus(f"{ROWS} button", 1)
    page.tab.press("Enter", "\r")
    assert page.texts(f"{ROWS} button")[1] == "Really Unload"
    page.tab.press("Tab")
    assert page.texts(f"{ROWS} button")[1] == "Unload"
    assert names(page.web) == ["base", "a", "b"]


def test_where_adapters_are_not_changed_over_http_the_page_offers_nothing(
    spoken: Spoken, tab: Tab
) -> None:
    modules = [("a", str(spoken.adapters["a"]))]
    with web_server(spoken.config(lora_modules=modules), allows_updates=False) as web:
        page = Page(tab, web).open()
        assert page.shows(lambda: page.count(ROWS) == 1)
        assert page.count("#load") == page.count(".admin") == page.count(f"{ROWS} button") == 0
        assert "Change" not in tab.evaluate("document.querySelector('#adapters').innerText")


def used_keys(page: Page, path: str) -> list[str]:
    """The keys with which a route was asked."""
    return [request["headers"].get("authorization", "") for request in page.requests(path)]


def test_keys_are_asked_for_sent_and_kept_by_the_tab_alone(spoken: Spoken, tab: Tab) -> None:
    guard = GuardConfig(api_keys=("one",), admin_key="two")
    modules = [("a", str(spoken.adapters["a"]))]
    with web_server(spoken.config(lora_modules=modules), guard) as web:
        page = Page(tab, web).open()
        assert page.text("#trouble") == (
            "Unauthorized: the server asks for a key; give it under Keys"
        )
        assert tab.evaluate("document.querySelector('#keys').open")
        assert page.count(ROWS) == 0
        assert len(page.requests("/v1/models")) == 1
        page.fill("[name=api]", "wrong")
        page.click("#keys button")
        assert page.shows(lambda: len(page.requests("/v1/models")) == 2)
        assert page.shows(lambda: page.count("#trouble"))
        page.fill("[name=api]", "one")
        page.fill("[name=admin]", "two")
        page.click("#keys button")
        assert page.shows(lambda: page.count(ROWS) == 1)
        assert page.shows(lambda: page.count("#trouble") == 0)
        page.send("w5")
        assert page.shows(lambda: page.text(".answer .text") and page.is_idle())
        page.click(f"{ROWS} button")
        assert page.shows(lambda: page.text("#changed") == "a is pinned")
        assert used_keys(page, CHATS) == ["Bearer one"]
        assert used_keys(page, "/v1/lora_adapters/a/pin") == ["Bearer two"]
        assert used_keys(page, "/v1/models") == ["", "Bearer wrong", "Bearer one"]
        assert set(used_keys(page, "/v1/lora_adapters")) == {"Bearer one"}
        stored = tab.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
        assert stored == ["", 0, 1]
        tab.open(page.url)
        assert page.shows(lambda: page.count(ROWS) == 1)
        assert tab.evaluate("document.querySelector('[name=api]').value") == "one"


def test_a_server_that_is_gone_is_said_to_be(spoken: Spoken, tab: Tab) -> None:
    with web_server(spoken.config()) as web:
        page = Page(tab, web).open()
    assert page.shows(lambda: page.count("#trouble"))
    assert page.text("#trouble") == "the server does not answer"


def test_it_asks_its_own_server_alone_and_fails_nowhere(page: Page, web: Web) -> None:
    page.send("w5")
    assert page.shows(lambda: page.text(".answer .text") and page.is_idle())
    assert {r["url"].startswith(page.url) for r in page.requests()} == {True}
    paths = {r["url"].removeprefix(page.url.rstrip("/")) for r in page.requests()}
    assert {path for path in paths if not path.startswith("/page/")} == {
        *("/", "/v1/models", "/v1/lora_adapters", "/metrics", "/load", "/tokenize", CHATS),
        "/v1/load_lora_adapter",  # by OPTIONS: whether there is such a route
    }
    assert page.complaints() == []
    assert web.load == 0
