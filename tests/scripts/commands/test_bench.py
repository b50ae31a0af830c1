"""`trt-lora bench`: every contestant at every size, in a table, as JSON and in a file."""

import json
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.commands import streams, trt_lora

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


def test_tables_are_printed_for_each_size(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = bench(tiny_engine, capsys, "--ranks", "2")
    assert "\n1 row of 6 + 3 tokens, 1 round\n" in printed
    assert "\n2 rows of 6 + 3 tokens, 1 round\n" in printed
    rows = [line for line in printed.splitlines() if line.startswith("random, rank 2 ")]
    assert len(rows) == 5  # of each size its times and ratios, and its memory
    assert "KV cache of 2 rows" in printed
    assert max(map(len, printed.splitlines()[1:])) <= 100


def test_the_base_model_alone_has_no_ratios(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = bench(tiny_engine, capsys, "--ranks")
    assert "random" not in printed
    assert "x base" not in printed


def test_one_round_says_that_it_has_no_spread(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = bench(tiny_engine, capsys, "--ranks", "2")
    assert "one round: no spread, and a ratio may be noise" in printed
    assert "min to max" not in printed


def test_several_rounds_show_the_least_and_the_most_of_every_ratio(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    printed = bench(tiny_engine, capsys, "--ranks", "2", "--rounds", "3", "--export", path)
    _, c = read_benchmark(path).workloads[0].contestants
    ratios = (line.split() for line in printed.splitlines() if line.startswith("random"))
    (found,) = [row[3:] for row in ratios if "to" in row and f"{c.token_ratio:.2f}" in row][:1]
    first = [f"{c.first_token_ratio_min:.2f}", "to", f"{c.first_token_ratio_max:.2f}"]
    token = [f"{c.token_ratio_min:.2f}", "to", f"{c.token_ratio_max:.2f}"]
    assert found == [f"{c.first_token_ratio:.2f}", *first, f"{c.token_ratio:.2f}", *token]
    assert c.token_ratio_min <= c.token_ratio <= c.token_ratio_max
    assert "a wide min to max means a busy machine" in printed


def test_every_turn_is_a_line_on_stderr_with_json_too(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SHORT[:2], *SHORT[3:], "--ranks", "2", "--json"]
    out, err = streams(capsys, "bench", tiny_engine.engine, *options)
    assert json.loads(out)["workloads"]
    turns = [line for line in err.splitlines() if "row" in line]
    assert turns == [
        "warm-up, 1 row: (base)",
        "warm-up, 1 row: random, rank 2",
        "round 1 of 1, 1 row: random, rank 2",
        "round 1 of 1, 1 row: (base)",
    ]


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
