"""`trt-lora bench`: every contestant at every size, in a table, as JSON and in a file."""

import json
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.commands import trt_lora

from trt_lora.scripts.measuring.benchmark import read_benchmark

SHORT = ("--rows", "1", "2", "--prompt-tokens", "6", "--new-tokens", "3", "--rounds", "1")


def bench(
    tiny: TinyEngine, capsys: pytest.CaptureFixture[str], *options: str | Path, expected: int = 0
) -> str:
    return trt_lora(capsys, "bench", tiny.engine, *SHORT, *options, expected=expected)


def test_the_file_is_what_json_prints_and_holds_every_contestant_at_every_size(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    options: list[str | Path] = ["--adapter", f"a={tiny_engine.adapter}", "--ranks", "2", "16"]
    printed = bench(tiny_engine, capsys, *options, "--json", "--export", path)
    assert printed == path.read_text()
    assert json.loads(printed)["backend"] == "ONNX Runtime"
    found = read_benchmark(path)
    assert [(w.rows, w.prompt_tokens, w.new_tokens) for w in found.workloads] == [
        (1, 6, 3),
        (2, 6, 3),
    ]
    for times in found.workloads:
        ranks = {c.contestant: c.rank for c in times.contestants}
        assert ranks == {"(base)": 0, "a": 4, "random, rank 2": 2, "random, rank 16": 16}
        base, *others = times.contestants
        assert (base.first_token_ratio, base.token_ratio) == (1, 1)
        for c in (base, *others):
            assert 0 < c.token_p50_ms <= c.token_p90_ms <= c.token_p99_ms
            # One round: the ratio is that of the sums behind the rates.
            assert c.token_ratio == pytest.approx(base.tokens_per_second / c.tokens_per_second)
    sites = json.loads((tiny_engine.engine / "manifest.json").read_text())["sites"]
    values = sum(4 * (site["k"] + site["n"]) for site in sites)  # of a rank
    assert found.memory_bytes["a"] == 4 * values
    assert found.memory_bytes["random, rank 16"] == 16 * values


def test_a_table_is_printed_for_each_size(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = bench(tiny_engine, capsys, "--ranks")
    assert "\n1 row of 6 + 3 tokens, 1 round\n" in printed
    assert "\n2 rows of 6 + 3 tokens, 1 round\n" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith("(base)")]
    assert [row[2] for row in rows] == ["1.00", "1.00"]
    assert "random" not in printed
    assert "KV cache of 2 rows" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "17"], "error: --ranks is 17, and the engine takes 1 to 16\n"),
        (["--rounds", "0"], "error: --rounds is 0, expected 1 or more\n"),
        (["--adapter", "a=x", "--adapter", "a=y"], "names two adapters 'a'"),
        (["--export", "nowhere/x.json"], "error: --export is nowhere/x.json, expected a file in"),
        (["--adapter", "a"], "error: --adapter is 'a', expected NAME=PATH"),
        (["--backend", "tensorrt"], "cannot run on TensorRT here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny_engine: TinyEngine,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert message in bench(tiny_engine, capsys, *options, expected=2)
