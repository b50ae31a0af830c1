"""Charts: bars in proportion, and files of other programs that are read or refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARK
from support.doc_blocks import ROOT
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.report.bars import Bar, Chart
from trt_lora.scripts.report.kernel_charts import kernel_charts
from trt_lora.scripts.report.speed_charts import benchmark_charts, peer_charts


def texts(chart: Chart) -> dict[str, str]:
    return {bar.label: bar.text for bar in chart.bars}


def test_a_bar_is_a_part_of_the_longest() -> None:
    chart = Chart("t", (Bar("a", 2.0, ""), Bar("b", 8.0, ""), Bar("c", 0.0, "")))
    assert [chart.percent(bar) for bar in chart.bars] == [25, 100, 0]
    nothing = Chart("t", (Bar("a", 0.0, ""),))
    assert nothing.percent(nothing.bars[0]) == 0


def test_a_benchmark_gives_rates_times_and_ratios() -> None:
    rates, tokens, first = benchmark_charts(BENCHMARK)
    assert rates.title == "Tokens/s, 8 x 64 + 32 tokens"
    assert texts(rates) == {"(base)": "800.0", "json": "640.0"}
    assert texts(tokens)["json"] == "12.50 ms, p99 14.00 (1.25 x base)"
    assert texts(first)["json"] == "120 ms (1.20 x base)"


def test_the_repositorys_own_peers_are_read() -> None:
    path = ROOT / "docs" / "benchmarks" / "peers.json"
    decode, prompt, *_ = peer_charts(path)
    cell = json.loads(path.read_text())["cells"][0]["peers"]
    assert [bar.value for bar in decode.bars] == [row["decode, tokens/s"] for row in cell.values()]
    assert [bar.value for bar in prompt.bars] == [row["prompt, ms"] for row in cell.values()]
    assert [bar.label for bar in decode.bars if bar.is_ours] == ["trt-lora"]


def kernels_file(folder: Path, *layouts: tuple[str, list[str]]) -> Path:
    """What `inspect --kernels --json` prints; kernels of the first profile by their names."""
    kernel = {"kind": "gemm", "profile": 0, "stream": 0}
    found = [{"name": n, "kernels": [kernel | {"name": k} for k in ks]} for n, ks in layouts]
    path = folder / "kernels.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def manifest() -> Manifest:
    return replace(make_manifest(), profiles={"decode": {}})


def test_kernels_are_counted_by_layout_with_what_lora_adds(
    tmp_path: Path, manifest: Manifest
) -> None:
    plain = ("without LoRA", ["a"] * 9 + ["ReplConc_0"])  # a copy of another tensor
    plugin = ("plugin", ["a"] * 13 + ["ReplConc_0"])
    native = ("native", ["a"] * 14 + ["ReplConc_1"] * 6)
    (chart,) = kernel_charts(kernels_file(tmp_path, plain, plugin, native), manifest)
    assert chart.title == "Kernels, profile decode"
    assert texts(chart) == {
        "without LoRA": "10",
        "plugin": "14 (+4, 2.0 a layer)",
        "native": "20 (+10, 5.0 a layer, 5 copies of A and B)",
    }


def test_a_kernel_of_another_profile_counts_there_alone(tmp_path: Path, manifest: Manifest) -> None:
    path = kernels_file(tmp_path, ("without LoRA", ["a", "b"]))
    layouts = json.loads(path.read_text())
    layouts[0]["kernels"][1]["profile"] = 1
    path.write_text(json.dumps(layouts))
    both = replace(manifest, profiles={"decode": {}, "prefill": {}})
    assert [texts(chart)["without LoRA"] for chart in kernel_charts(path, both)] == ["1", "1"]


def test_a_profile_that_was_not_counted_has_no_chart(tmp_path: Path, manifest: Manifest) -> None:
    path = kernels_file(tmp_path, ("without LoRA", ["a"]))
    path.write_text(path.read_text().replace('"profile": 0', '"profile": 1'))
    both = replace(manifest, profiles={"decode": {}, "prefill": {}})
    assert [chart.title for chart in kernel_charts(path, both)] == ["Kernels, profile prefill"]


@pytest.mark.parametrize("text", ['[{"name": 3, "kernels": []}]', '[{"name": "a"}]', "[[]]", "[]"])
def test_another_list_is_not_taken_for_kernels(
    text: str, tmp_path: Path, manifest: Manifest
) -> None:
    (tmp_path / "k.json").write_text(text)
    with pytest.raises(ConfigError, match="is not what `trt-lora inspect ENGINE --kernels --json`"):
        kernel_charts(tmp_path / "k.json", manifest)


@pytest.mark.parametrize("text", ["{}", '{"peers": {}, "cells": [{}]}', '{"peers": 1, "cells": 2}'])
def test_another_object_is_not_taken_for_peers(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not what `python -m .*\.bench\.peers`"):
        peer_charts(tmp_path / "p.json")


def test_a_file_that_is_no_json_is_named(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "k.json").write_text("no")
    with pytest.raises(AdapterError, match=r"k\.json is not JSON"):
        kernel_charts(tmp_path / "k.json", manifest)
