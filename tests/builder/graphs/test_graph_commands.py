"""The commands on a graph: build-engine, what shows an engine, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import trt_lora
from support.models.graph_nets import Built, Exported

from trt_lora.runtime import read_manifest
from trt_lora.scripts.build_engine import main
from trt_lora.scripts.verification import graph_outputs
from trt_lora.scripts.verification.deltas import engine_factors

Printed = pytest.CaptureFixture[str]


def build_engine(capsys: Printed, *words: str | Path, expected: int = 0) -> str:
    """Run the command and return what it printed."""
    code = 0
    try:
        main([*map(str, words)])
    except SystemExit as exited:
        code = int(exited.code or 0)
    printed = capsys.readouterr()
    assert code == expected, printed.err
    return printed.out or printed.err


def test_build_engine_makes_one_of_a_file(
    exported: Exported, tmp_path: Path, capsys: Printed
) -> None:
    onnx, sizes = exported.graphs["torchscript"], ("--shapes", "batch=1:2:4", "tokens=6")
    options = ("--lora-target-modules", "to_q", "ff.0", "--flavour", "none", "--output")
    told = build_engine(capsys, "--onnx", onnx, *sizes, *options, tmp_path / "e")
    assert "4 LoRA sites, rank 1 to 64, float32, none" in told
    (ranges,) = read_manifest(tmp_path / "e").profiles.values()
    assert ranges["sample"].max == (4, 6, 8)
    names = ("--path-prefix", "model", "--dry-run", "--json", "--lora-target-modules", "to_q")
    listing = json.loads(build_engine(capsys, "--onnx", onnx, *names))
    assert [each["path"] for each in listing["sites"]] == [
        "model.blocks.0.to_q",
        "model.blocks.1.to_q",
    ]
    assert "its second operand is not a constant weight" in str(listing["left_alone"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--onnx", "m.onnx", "--model", "m"), "--model m is of a model's folder"),
        (("--onnx", "m.onnx", "--lora-vectors"), "--lora-vectors True is of language models"),
        (("--onnx", "m.onnx", "--dtype", "float32"), "--dtype float32 is of a model's folder"),
        (("--onnx", "m.onnx", "--max-seq-len", "9"), "--max-seq-len 9 is of language models"),
        (("--model", "m", "--shapes", "b=1"), "--shapes ['b=1'] is of --onnx, which is not there"),
        (("--model", "m", "--path-prefix", "x"), "--path-prefix x is of --onnx"),
        ((), "pass --model DIR or --onnx FILE"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    words: tuple[str, ...], reason: str, capsys: Printed
) -> None:
    told = build_engine(capsys, *words, "--lora-target-modules", "fc", expected=2)
    assert reason in " ".join(told.split())


def test_inspect_list_check_and_report_show_a_graph(
    exported: Exported, built: dict[str, Built], tmp_path: Path, capsys: Printed
) -> None:
    engine = built["dynamo"].engine
    told = trt_lora(capsys, "inspect", engine)
    assert "sample float32 [batch, tokens, 8]" in told
    assert "lengths" not in told
    told = trt_lora(capsys, "inspect", engine, "--adapter", exported.adapter)
    assert "the engine takes it" in told
    assert "graph" in json.loads(trt_lora(capsys, "inspect", engine, "--json"))["kind"]
    assert "whole" in trt_lora(capsys, "check", engine)
    assert "dynamo" in trt_lora(capsys, "list", engine)
    page = tmp_path / "page.html"
    trt_lora(capsys, "report", engine, "--adapter", f"a={exported.adapter}", "--html", page)
    assert "sample float32 [batch, tokens, 8]" in page.read_text()


def test_kernels_of_a_graph_are_counted(built: dict[str, Built], capsys: Printed) -> None:
    engine = built["dynamo"].engine
    layouts = {
        each["name"]: each["kernels"]
        for each in json.loads(trt_lora(capsys, "inspect", engine, "--kernels", "--json"))
    }
    counts = [len(layouts[name]) for name in ("without LoRA", "plugin", "native, dynamic rank")]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "ENGINE", "--rows", "2"),
        ("compare", "ENGINE"),
        ("verify", "ENGINE", "--model", "ENGINE", "--adapter", "ADAPTER"),
        ("verify", "ENGINE", "--reference", "float", "--adapter", "ADAPTER"),
        ("generate", "ENGINE", "a cat"),
        ("chat", "ENGINE"),
        ("serve", "ENGINE"),
    ],
)
def test_what_reads_tokens_refuses_a_graph_by_name(
    words: tuple[str, ...], exported: Exported, built: dict[str, Built], capsys: Printed
) -> None:
    places = {"ENGINE": str(built["torchscript"].engine), "ADAPTER": str(exported.adapter)}
    told = trt_lora(capsys, *(places.get(word, word) for word in words), expected=2)
    assert "is of language models, and this engine was built from the graph" in told


def test_bench_runs_a_graph_at_the_sizes_of_its_plan(
    exported: Exported, built: dict[str, Built], tmp_path: Path, capsys: Printed
) -> None:
    words = ("bench", built["dynamo"].engine, "--adapter", f"a={exported.adapter}", "--ranks", "2")
    where = ("--backend", "onnxruntime", "--rounds", "2")
    found = json.loads(trt_lora(capsys, *words, *where, "--export", tmp_path / "b", "--json"))
    (times,) = found["workloads"]
    assert (times["rows"], times["prompt_tokens"], times["rounds"]) == (2, 0, 2)
    names = ["(base)", "a", "random, rank 2"]
    assert [each["contestant"] for each in times["contestants"]] == names
    assert all(each["token_p50_ms"] > 0 for each in times["contestants"])
    shapes = ("--shapes", "batch=3", "tokens=4")
    told = trt_lora(capsys, *words, *where, *shapes)
    assert "3 rows of 1 + 8 runs, 2 rounds" in told
    assert "first run ms  run p50 ms" in told
    page = tmp_path / "page.html"
    engine = built["dynamo"].engine
    trt_lora(capsys, "report", engine, "--benchmarks", tmp_path / "b", "--html", page)
    assert "random, rank 2" in page.read_text()
    told = trt_lora(capsys, *words, "--shapes", "batch=3", "token=4", expected=2)
    assert "nothing says how large tokens shall be; pass --shapes tokens=2" in told
    told = trt_lora(capsys, *words, *shapes, "toke=4", expected=2)
    assert "--shapes toke: no input of the engine has such a size; did you mean 'tokens'" in told


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_verify_compares_a_graph_with_merged_weights(
    exporter: str,
    exported: Exported,
    built: dict[str, Built],
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--adapter", exported.adapter, "--backend", "onnxruntime", "--json")
    words = ("verify", built[exporter].engine, *options)
    found = json.loads(trt_lora(capsys, *words))
    base, adapted = found["outputs"]
    assert found["same"]
    assert (base["adapter"], base["change"], adapted["adapter"]) == ("", 0, "adapter")
    assert adapted["change"] > 0.1
    assert max(base["largest"], adapted["largest"]) < 1e-5

    def others(*args: Any) -> dict[str, Any]:  # than the engine has, at one site
        return {path: pair for path, pair in engine_factors(*args).items() if path != "proj_in"}

    monkeypatch.setattr(graph_outputs, "engine_factors", others)
    told = json.loads(trt_lora(capsys, *words, expected=1))
    assert "out with adapter is off by" in told["problems"][0]
