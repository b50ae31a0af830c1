"""The page: what it says of an engine, every text escaped, nothing loaded from elsewhere."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from support.benchmarks import BENCHMARK
from support.fakes.fake_engine import make_manifest

from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.files.file_record import FileRecord
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.report.bars import Bar, Chart
from trt_lora.scripts.report.page import page_of

EVIL = "<script>alert(1)</script>"
QUOTED = '"><img src=x onerror=alert(1)>'
PATH = "model.layers.0.self_attn.q_proj"


class Elements(HTMLParser):
    """All tags with their attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def engine(**fields: Any) -> Manifest:
    record = FileRecord(sha256="0" * 64, size_bytes=2_500_000)
    return replace(make_manifest(), files={"model.onnx": record}, **fields)


def coverage(manifest: Manifest, **fields: Any) -> Coverage:
    """An adapter of rank 4 at the first site alone."""
    first, *others = manifest.sites
    sites = (SiteCoverage(first.path, 4, nbytes=1000), *(SiteCoverage(s.path) for s in others))
    return replace(Coverage("adapters/a", {f"lora_A_{first.path}": ("t",)}, {}, sites), **fields)


def test_the_page_says_what_the_engine_takes_and_what_became_of_an_adapter() -> None:
    manifest = engine()
    page = page_of(Path("engines/tiny"), manifest, {"a": coverage(manifest)})
    found = Elements(page.html())
    text = " ".join(found.text.split())
    assert "tiny (TinyForCausalLM)" in text
    assert "1 tensors bound, 0 not, 0 ignored; 1 of 4 sites adapted" in text
    assert "model.onnx 2.5 MB" in text
    assert "adapter a 1.0 kB" in text
    cells = [fields["class"] for tag, fields in found.tags if tag == "td"]
    assert cells == ["bound", "dummy", "dummy", "dummy"]
    assert any(PATH in (fields.get("title") or "") for _, fields in found.tags)


def test_the_page_has_no_path_of_the_machine_that_it_was_made_on() -> None:
    manifest = engine()
    hub = "/home/me/.cache/hub/models--org--pirate/snapshots/0123abcd"
    sources = {"a": "/home/me/work/adapters/secret-a", "b": hub, "c": "../there/c.safetensors"}
    found = {name: coverage(manifest, source=source) for name, source in sources.items()}
    html = page_of(Path("/home/me/work/engines/tiny"), manifest, found).html()
    text = Elements(html).text
    assert "/home" not in html
    assert "there" not in text
    for last in ("secret-a", "org/pirate", "c.safetensors", "tiny"):
        assert last in text


def test_what_the_page_was_not_given_is_named_with_the_options_that_give_it() -> None:
    manifest = engine()
    kernels = (Chart("Kernels, profile decode", (Bar("plugin", 1.0, "1"),)),)
    bare, full = (
        Elements(page_of(Path("e"), manifest, {}, kernels=k, benchmark=b).html()).text
        for k, b in (((), None), (kernels, BENCHMARK))
    )
    for option in ("--kernels", "--benchmarks"):
        assert option in bare
        assert option not in full


def test_an_adapter_that_is_refused_says_so_with_every_reason() -> None:
    manifest = engine()
    refused = coverage(manifest, unexpected_keys={"lm_head.lora_A": "no site has this path"})
    found = Elements(page_of(Path("e"), manifest, {"a": refused}).html())
    assert "The engine refuses it" in found.text
    assert "lm_head.lora_A: no site has this path" in found.text


def test_names_from_files_are_text_and_never_markup() -> None:
    base = replace(make_manifest().base_model, name=EVIL, architecture=QUOTED)
    site = replace(make_manifest().sites[0], path=f"layers.0.{QUOTED}")
    manifest = engine(base_model=base, sites=(site,), versions={EVIL: QUOTED})
    hostile = coverage(
        manifest,
        source=EVIL,
        unexpected_keys={EVIL: QUOTED},
        ignored={QUOTED: EVIL},
        warnings=(EVIL,),
    )
    contestant = replace(BENCHMARK.workloads[0].contestants[0], contestant=EVIL)
    workload = replace(BENCHMARK.workloads[0], contestants=(contestant,))
    benchmark = replace(
        BENCHMARK,
        engine=EVIL,
        machine={EVIL: QUOTED},
        memory_bytes={EVIL: 1},
        workloads=(workload,),
    )
    charts = (Chart(EVIL, (Bar(QUOTED, 1.0, EVIL),)),)
    page = page_of(
        Path(EVIL), manifest, {QUOTED: hostile}, kernels=charts, benchmark=benchmark, peers=charts
    )
    html = page.html()
    found = Elements(html)
    assert not {"script", "img"} & {tag for tag, _ in found.tags}
    assert not any(name.startswith("on") for _, fields in found.tags for name in fields)
    assert html.count("&lt;script&gt;") >= 12
    assert EVIL in found.text


def test_the_page_has_no_script_and_loads_nothing() -> None:
    manifest = engine()
    html = page_of(Path("e"), manifest, {"a": coverage(manifest)}, benchmark=BENCHMARK).html()
    found = Elements(html)
    links = [fields.get(n) for _, fields in found.tags for n in ("href", "src") if n in fields]
    assert links == ["data:,"]
    assert not re.search(r"https?:|url\(|@import", html)
    policies = [f["content"] or "" for _, f in found.tags if f.get("http-equiv")]
    assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]
