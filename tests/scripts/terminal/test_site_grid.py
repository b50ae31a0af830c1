"""The grid of `trt-lora inspect --adapter`: a glyph a site, a legend, and what is not bound."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.commands import Terminal, trt_lora
from support.fakes.fake_engine import make_manifest, write_peft

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.terminal.coverage_report import GlyphGrid, glyph_grid, print_grid


def pair(path: str, rank: int, k: int = 8, n: int = 6) -> dict[str, Array]:
    """A and B of a module as PEFT stores them."""
    shapes = {f"{path}.lora_A": (rank, k), f"{path}.lora_B": (n, rank)}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def engine_of(manifest: Manifest, folder: Path) -> Path:
    """A directory that `inspect` takes for an engine."""
    folder.mkdir()
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


def report(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tensors: dict[str, Array],
    *,
    expected: int = 0,
    manifest: Manifest | None = None,
) -> list[str]:
    """The lines that are printed of an adapter in an engine for q_proj and v_proj of two layers."""
    engine = engine_of(manifest or make_manifest(), folder / "engine")
    ranks = {n.removesuffix(".lora_A"): len(t) for n, t in tensors.items() if n[-1] == "A"}
    adapter = write_peft(folder / "adapter", tensors, rank_pattern=ranks)
    return trt_lora(capsys, "inspect", engine, "--adapter", adapter, expected=expected).splitlines()


def test_a_site_has_the_letter_of_its_rank_or_is_a_dummy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 8) | pair(
        "model.layers.1.self_attn.v_proj", 2
    )
    *grid, verdict = report(capsys, tmp_path, tensors)
    assert grid == [
        "model.layers      0",
        "self_attn.q_proj  b.",
        "self_attn.v_proj  .a",
        "a rank 2   b rank 8   . no tensor: a dummy",
    ]
    assert "the engine takes it; 4 tensors bound, 0 not, 0 ignored; 2 of 4 sites" in verdict


def test_modules_that_the_engine_refuses_are_in_the_grid_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 4)
    tensors |= pair("model.layers.0.mlp.up_proj", 4) | pair("model.layers.1.mlp.up_proj", 4)
    tensors |= {"model.layers.1.self_attn.v_proj.lora_A": np.ones((4, 8), np.float32)}
    lines = report(capsys, tmp_path, tensors, expected=1)
    assert lines[:5] == [
        "model.layers      0",
        "self_attn.q_proj  a.",
        "self_attn.v_proj  .x",
        "mlp.up_proj       xx",
        "a rank 4   . no tensor: a dummy   x refused",
    ]
    up = "base_model.model.model.layers.*.mlp.up_proj.lora_A.weight x 2: module model.layers.*.mlp."
    assert any(line.startswith(f"not bound: {up}") for line in lines[5:])
    assert any(line.endswith("v_proj is missing from its pair") for line in lines[5:])
    assert "the engine refuses it; 2 tensors bound, 5 not" in lines[-1]


def test_sites_that_share_a_tensor_have_capitals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    manifest = replace(make_manifest(), sites=tuple(Site(path, 8, 6, "float32") for path in paths))
    tensors = pair("model.layers.0.self_attn.qkv_proj", 4, n=18)
    lines = report(capsys, tmp_path, tensors, manifest=manifest)
    assert [line[-1] for line in lines[1:4]] == ["A", "A", "A"]
    assert lines[4] == "A rank 4, tensors shared"


def coverage_of(ranks: dict[str, int], unexpected: dict[str, str] | None = None) -> Coverage:
    """The report of an adapter with these ranks by site."""
    sites = tuple(SiteCoverage(path, rank) for path, rank in ranks.items())
    return Coverage("adapter", {}, unexpected or {}, sites)


def read_back(grid: GlyphGrid) -> dict[str, str]:
    """What the lines and the legend say of every site, read as a person does."""
    found: dict[str, str] = {}
    stem, first = "", 0
    for label, glyphs in grid.lines():
        if header := re.match(r"\d+", glyphs):
            stem, first = label.strip(), int(header[0])
            continue
        for column, glyph in enumerate(glyphs):
            if glyph != " ":
                path = f"{stem}.{first + column}.{label.strip()}"
                found[path] = grid.legend[glyph]
    return found


def test_the_ranks_of_a_large_model_can_be_read_from_its_grid() -> None:
    rng = np.random.default_rng(0)
    stems = [f"{stem}.layers.{i}" for stem in ("encoder", "decoder") for i in range(126)]
    paths = [f"{stem}.{name}" for stem in stems for name in ("attn.q_proj", "mlp.up_proj")]
    ranks = {path: int(rng.integers(0, 24)) for path in paths}
    grid = glyph_grid(coverage_of(ranks), make_manifest())
    names = {path: f"rank {r}" if r else "no tensor: a dummy" for path, r in ranks.items()}
    assert read_back(grid) == names
    assert len(grid.lines()) == 2 * 3 * 3  # stems, blocks of 60 layers, a header and two modules
    assert max(len(label + glyphs) for label, glyphs in grid.lines()) < 80


def test_a_site_outside_the_layers_has_a_line_of_its_own() -> None:
    grid = glyph_grid(coverage_of({"model.layers.0.up": 4, "lm_head": 0}), make_manifest())
    assert grid.lines() == [("model.layers", "0"), ("up          ", "a"), ("lm_head     ", ".")]


def test_more_ranks_than_letters_are_another_rank() -> None:
    grid = glyph_grid(coverage_of({f"h.{i}.up": i + 1 for i in range(30)}), make_manifest())
    assert grid.lines()[1][1] == "abcdefghijklmnopqrstuvwyz+++++"
    assert grid.legend["z"] == "rank 25"
    assert grid.legend["+"] == "another rank"


def test_names_in_a_file_cannot_make_a_grid_of_any_size() -> None:
    names = [f"h.{10**6 * i}.up" for i in range(1, 99)] + [f"h.0.m{i}" for i in range(9999)]
    names += [f"s{i}.0.up" for i in range(99)] + [f"h.{'9' * 9999}.up", "h.1.\x1b[2J", "up"]
    refused = {f"base_model.model.{name}.lora_A.weight": "no site" for name in names}
    lines = glyph_grid(coverage_of({"h.0.up": 4}, refused), make_manifest()).lines()
    assert len(lines) == 1 + 1 + 12
    assert all(line.isprintable() for line, _ in lines)


def test_glyphs_have_colours_on_a_terminal_with_rich_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich", reason="colours are rich's")
    coverage = coverage_of({"h.0.up": 4, "h.1.up": 0}, {"h.2.up.lora_A.weight": "no site"})
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain, piped = Terminal(), Terminal(), io.StringIO()
    for stream, has_rich in ((coloured, True), (plain, False), (piped, True)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            if not has_rich:
                patch.setitem(sys.modules, "rich.console", None)
            print_grid(coverage, make_manifest())
    assert "\x1b[32ma\x1b[0m" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert plain.getvalue() == piped.getvalue() == re.sub("\x1b.*?m", "", coloured.getvalue())
