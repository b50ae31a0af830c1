"""`trt-lora report`: the page is written whole, and never over another file by mistake."""

import json
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.benchmarks import BENCHMARK
from support.commands import trt_lora


def report(
    tiny: TinyEngine, capsys: pytest.CaptureFixture[str], *options: str | Path, expected: int = 0
) -> str:
    return trt_lora(capsys, "report", tiny.engine, *options, expected=expected)


def test_a_page_shows_the_engine_its_adapters_and_its_benchmark(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench.json").write_text(BENCHMARK.to_json())
    page = tmp_path / "page.html"
    options: list[str | Path] = ["--adapter", f"a={tiny_engine.adapter}", "--html", page]
    printed = report(tiny_engine, capsys, *options, "--benchmarks", tmp_path / "bench.json")
    html = page.read_text()
    assert printed == f"{page}: {len(html)} characters; open it in any browser\n"
    assert html.startswith("<!DOCTYPE html>\n")
    assert "<h3>a</h3>" in html
    assert "4 of 4 sites adapted" in html
    assert "12.50 ms, p99 14.00 (1.25 x base)" in html


def test_json_says_which_adapters_the_engine_takes(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    options: list[str | Path] = ["--adapter", f"a={tiny_engine.adapter}", "--html", page, "--json"]
    printed = json.loads(report(tiny_engine, capsys, *options))
    assert printed == {"html": str(page), "adapters_taken": {"a": True}}


def test_a_file_that_is_there_is_replaced_only_with_force(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    message = report(tiny_engine, capsys, "--html", page, expected=2)
    assert message == f"error: {page} exists; choose another place, or pass --force\n"
    assert page.read_text() == "mine"
    report(tiny_engine, capsys, "--html", page, "--force")
    assert "dummy" in page.read_text()


def test_two_adapters_cannot_have_one_name(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice: list[str | Path] = ["--adapter", f"a={tiny_engine.adapter}"] * 2
    message = report(tiny_engine, capsys, *twice, "--html", tmp_path / "page.html", expected=2)
    assert message.startswith("error: --adapter names two adapters 'a'")


def test_another_file_is_not_taken_for_a_benchmark(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: list[str | Path] = ["--html", tmp_path / "page.html", "--benchmarks"]
    manifest = tiny_engine.engine / "manifest.json"
    message = report(tiny_engine, capsys, *options, manifest, expected=2)
    assert "is not what `trt-lora bench --export` writes" in message
    assert not (tmp_path / "page.html").exists()
