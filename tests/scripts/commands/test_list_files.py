"""`trt-lora list`: what lies under a folder, and nothing that only looks like it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.commands import streams, trt_lora
from support.fakes.tiny_engine import engine_directory, small_manifest

from trt_lora.runtime.adapters.load import looks_like_adapter
from trt_lora.runtime.manifest import MANIFEST_FILE
from trt_lora.scripts.commands import list_files
from trt_lora.scripts.diagnosis import folder as search
from trt_lora.scripts.terminal.console import INTERRUPTED

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def peft_adapter(folder: Path, *ranks: int, base: str = "org/base") -> Path:
    """An adapter with a layer of each rank."""
    folder.mkdir(parents=True)
    fields = CONFIG | {"base_model_name_or_path": base}
    pattern = {f"model.layers.{layer}.self_attn.q_proj": r for layer, r in enumerate(ranks)}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"rank_pattern": pattern}))
    tensors = {}
    for layer, rank in enumerate(ranks):
        start = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{start}A.weight"] = np.ones((rank, 8), np.float16)
        tensors[f"{start}B.weight"] = np.ones((8, rank), np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two engines, an adapter and a file of one; beside them what is none."""
    many = replace(small_manifest("none", "float16"), max_loras=3)
    engine_directory(tmp_path / "engines" / "many", many)
    engine_directory(tmp_path / "engines" / "one")
    peft_adapter(tmp_path / "adapters" / "deep" / "pirate", 4, 16, 8)
    pair = {f"lora_{f}_layers.0.up": np.ones((2, 2), np.float32) for f in "AB"}
    save_file(pair, tmp_path / "adapters" / "named.safetensors")
    save_file(
        {"weight": np.ones((3, 3), np.float32)}, tmp_path / "model.safetensors"
    )  # a base model's
    peft_adapter(tmp_path / ".cache" / "hidden", 4)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text("{}")  # a web page's
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    return json.loads(trt_lora(capsys, "list", *words, "--json"))


def test_engines_and_adapters_are_found_at_any_depth(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, folder)
    many, one = found["engines"]
    assert (many["path"], many["flavour"]) == (str(folder / "engines" / "many"), "none")
    assert (many["base_model"], many["dtype"]) == ("tiny", "float16")
    assert (many["max_loras"], one["max_loras"]) == (3, 0)
    assert (one["max_lora_rank"], one["max_batch_size"], one["max_seq_len"]) == (4, 4, 16)
    files = (folder / "engines" / "one").iterdir()
    assert one["size_bytes"] == sum(f.stat().st_size for f in files if f.name != MANIFEST_FILE)
    pirate, named = found["adapters"]
    assert pirate == {
        "path": str(folder / "adapters" / "deep" / "pirate"),
        "base_model": "org/base",
        "ranks": [4, 8, 16],
        "sites": 3,
        "dtypes": ["float16"],
    }
    assert (named["path"], named["ranks"]) == (str(folder / "adapters" / "named.safetensors"), [2])
    assert found["unreadable"] == []


def test_a_table_has_a_line_for_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in trt_lora(capsys, "list", folder).splitlines()]
    engines = [str(folder / "engines" / name) for name in ("many", "one")]
    assert lines[0][:3] == ["engine", "base", "model"]
    assert lines[1][:6] == [engines[0], "tiny", "float16", "none", "1-4", "3"]
    assert lines[2][:6] == [engines[1], "tiny", "float32", "tensorrt-rtx", "1-4", "1"]
    assert lines[3] == []
    assert lines[5][1:] == ["org/base", "float16", "4-16", "3"]
    assert lines[6][1:] == ["-", "float32", "2", "1"]


def test_what_is_damaged_is_named_with_its_fault_and_hides_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = peft_adapter(folder / "adapters" / "broken", 4) / "adapter_model.safetensors"
    broken.write_bytes(b"nothing")
    (folder / "engines" / "one" / "manifest.json").write_text("{}")
    found = listed(capsys, folder)
    assert (len(found["engines"]), len(found["adapters"])) == (1, 2)
    adapter, engine = found["unreadable"]
    assert "is not a valid safetensors file" in adapter["reason"]
    assert engine["path"] == str(folder / "engines" / "one")
    assert "cannot be read" in engine["reason"]


def test_a_folder_may_be_the_engine_or_the_adapter_itself(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(listed(capsys, folder / "engines" / "one")["engines"]) == 1
    assert len(listed(capsys, folder / "adapters" / "deep" / "pirate")["adapters"]) == 1


def test_links_to_engines_are_listed_and_circles_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = folder / "links"
    inside.mkdir()
    (inside / "engine").symlink_to(folder / "engines" / "one")
    (inside / "up").symlink_to(folder)
    (engine,) = listed(capsys, inside)["engines"]
    assert engine["path"] == str(inside / "engine")


def test_the_folder_is_this_one_by_default_and_emptiness_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trt_lora(capsys, "list") == ".: no engine and no adapter\n"
    said = trt_lora(capsys, "list", "nowhere", expected=2)
    assert said.startswith("error: nowhere is no folder")


def test_a_search_stops_after_some_folders_and_says_where_and_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The folder itself, adapters, engines, page; what lies in them is seen, and not looked into.
    out, err = streams(capsys, "list", folder, "--folders", "4", "--json")
    found = json.loads(out)
    assert [Path(engine["path"]).name for engine in found["engines"]] == ["many", "one"]
    assert [Path(adapter["path"]).name for adapter in found["adapters"]] == ["named.safetensors"]
    assert found["complete"] is False
    deep = folder / "adapters" / "deep"
    assert err == (
        f"note: stopped after 4 folders, before {deep}; list a folder further in, or pass "
        "--folders 8\n"
    )
    out, err = streams(capsys, "list", folder, "--folders", "5", "--json")
    assert (json.loads(out)["complete"], err) == (True, "")
    assert len(json.loads(out)["adapters"]) == 2


def test_what_is_near_is_found_before_what_is_deep(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in range(9):
        (folder / "a" / "b" / str(name)).mkdir(parents=True)
        (folder / "z" / "b" / str(name)).mkdir(parents=True)
    out, _ = streams(capsys, "list", folder, "--folders", "6", "--json")
    assert len(json.loads(out)["engines"]) == 2


def test_other_file_systems_are_not_looked_into_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "device_of", lambda path: "engines" in str(path))
    out, err = streams(capsys, "list", folder, "--json")
    found = json.loads(out)
    assert (found["engines"], len(found["adapters"]), found["complete"]) == ([], 2, True)
    assert err == (
        f"note: on another file system, and not looked into: {folder / 'engines'}; list it by "
        "its name\n"
    )


def test_a_long_search_says_where_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_files, "EVERY", 2)
    out, err = streams(capsys, "list", folder, "--json")
    adapters = folder / "adapters"
    assert err == f"2 folders, now in {folder / 'engines'}\n4 folders, now in {adapters / 'deep'}\n"
    assert json.loads(out)["complete"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_prints_what_was_found(
    options: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(path: Path) -> bool:
        if path.name == "pirate":
            raise KeyboardInterrupt
        return looks_like_adapter(path)

    monkeypatch.setattr(search, "looks_like_adapter", interrupted)
    out, err = streams(capsys, "list", folder, *options, expected=INTERRUPTED)
    assert "named.safetensors" in out
    assert "pirate" not in out
    assert f"note: interrupted before {folder / 'adapters' / 'deep'}" in err
    none, _ = streams(capsys, "list", folder / "adapters" / "deep", expected=INTERRUPTED)
    assert none == f"{folder / 'adapters' / 'deep'}: no engine and no adapter so far\n"
    if options:
        assert json.loads(out)["complete"] is False
