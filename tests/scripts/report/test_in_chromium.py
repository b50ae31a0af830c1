"""The page in a browser: it asks nobody, fails nowhere, and is readable on a phone by night."""

from dataclasses import replace
from pathlib import Path

from support.benchmarks import BENCHMARK
from support.chromium import Tab, chromium_program, chromium_tab
from support.doc_blocks import ROOT
from support.fakes.fake_engine import make_manifest
from support.readable import CONTRAST, SMALLEST, WIDEST

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.scripts.report.bars import Bar, Chart
from trt_lora.scripts.report.page import page_of
from trt_lora.scripts.report.speed_charts import peer_charts

# Of each chart, how far from its share of the longest bar is any bar, in pixels?
UNEVEN = """
Math.max(...[...document.querySelectorAll('figure')].map(figure => {
  const bars = [...figure.querySelectorAll('rect')];
  const width = bar => bar.getBoundingClientRect().width;
  const share = bar => parseFloat(bar.getAttribute('width')) / 100;
  const longest = Math.max(...bars.map(width));
  return Math.max(...bars.map(bar => Math.abs(width(bar) - share(bar) * longest)));
}))
"""


def write_page(folder: Path) -> Path:
    """A page with all that it can have, of an engine with more layers than a phone is wide."""
    sites = tuple(Site(f"model.layers.{n}.self_attn.q_proj", 8, 6, "float32") for n in range(80))
    manifest = replace(make_manifest(), sites=sites)
    adapted = tuple(SiteCoverage(site.path, 64) for site in sites)
    refused = Coverage(
        "adapters/a", {}, {f"{'x' * 200}.lora_A": "no site"}, adapted, (), {}, ("w",)
    )
    kernels = (
        Chart("Kernels", tuple(Bar("native", float(n), f"{n} kernels" * n) for n in (1, 4))),
    )
    page = page_of(
        Path("engines") / ("e" * 200),
        manifest,
        {"a": refused},
        kernels=kernels,
        benchmark=BENCHMARK,
        peers=peer_charts(ROOT / "docs" / "benchmarks" / "peers.json"),
    )
    (folder / "page.html").write_text(page.html())
    return folder / "page.html"


def test_a_browser_shows_it_at_any_width_and_hour_and_asks_nobody(tmp_path: Path) -> None:
    page = write_page(tmp_path)
    with chromium_tab(chromium_program(), tmp_path / "profile") as tab:
        tab.open(page)
        tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
        backgrounds = {
            (width, scheme): look(tab, width, scheme)
            for width in (1280, 390)
            for scheme in ("light", "dark")
        }
        requests = [event["request"]["url"] for event in tab.happened("Network.requestWillBeSent")]
        assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
        assert tab.happened("Log.entryAdded") == []
        assert tab.happened("Runtime.consoleAPICalled") == []
        assert tab.happened("Runtime.exceptionThrown") == []
    assert backgrounds[390, "light"] == backgrounds[1280, "light"]
    assert backgrounds[390, "dark"] == backgrounds[1280, "dark"] != backgrounds[390, "light"]


def look(tab: Tab, width: int, scheme: str) -> str:
    """Check that the page is readable, and return its background."""
    tab.show(width, scheme)
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= width
    assert tab.evaluate(WIDEST) <= width
    assert tab.evaluate(SMALLEST) >= 12
    assert tab.evaluate(UNEVEN) < 1
    assert tab.evaluate(CONTRAST) >= 4.5  # WCAG AA
    assert tab.evaluate("document.querySelectorAll('rect').length") > 60
    background: str = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return background
