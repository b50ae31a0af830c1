"""Adapters of a folder are read when they are used for the first time, in nobody else's step."""

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapter_routes import GREEDY, KNOWN, PROMPT, SAMPLING, load, names, said, unload
from support.adapter_routes import refused_of_folder as faults
from support.eventually import SECONDS, eventually
from support.fakes.slot_engine import expected_answer, number_file
from support.served_engines import MakeGated, Spoken, write_adapter
from support.web_server import COMPLETIONS, Web, web_server

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.files.untrusted_file import AdapterFile
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters import folder_follower
from trt_lora.runtime.server.engine_process.adapter_desk import AdapterDesk


@dataclass(frozen=True)
class HeldReads:
    """Reads of adapters: one has begun, and they may end."""

    begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)


FAR = 3600.0  # seconds to the second look: what comes after the first one is found when asked for
FOUND_BAD = "LoRA adapter 'x' was found but could not be loaded."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "folder"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def web(spoken: Spoken, folder: Path) -> Iterator[Web]:
    """A server of an empty folder that it does not look at again."""
    with web_server(spoken.config(lora_dir=folder, lora_dir_refresh_s=FAR)) as running:
        yield running


# ---------------------------------------------------------------------------- asked for by its name


def test_what_was_published_a_moment_ago_is_found(
    web: Web, folder: Path, manifest: Manifest
) -> None:
    assert names(web) == ["base"]
    write_adapter(folder / "x", manifest, seed=1)
    write_adapter(folder / "y", manifest, seed=2)
    first = said(web, "x")
    assert said(web, "base:y") != first
    assert names(web) == ["base", "x", "y"]
    card = web.client.get("/v1/models").json()["data"][1]
    assert (card["root"], card["parent"]) == (str(folder / "x"), "base")
    write_adapter(folder / "z", manifest, seed=1)
    for path in ("/tokenize", COMPLETIONS):
        web.answer(path, prompt="w5 w6", model="z")


def test_what_is_bad_is_told_in_vllms_words_to_who_asks_first(
    web: Web, folder: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    for fields in ({"rank": 32}, {"use_dora": True}):
        write_adapter(folder / "x", manifest, **fields)
        with caplog.at_level(logging.WARNING):
            error = web.refusal(COMPLETIONS, 400, prompt=PROMPT, model="x")
            assert (error["message"], error["param"]) == (FOUND_BAD, "model")
            for _ in range(2):  # it is known by now
                web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="x")
        assert names(web) == ["base"]
        assert faults(web).keys() == {"x"}
    assert "LoRA rank 32 is greater" in caplog.messages[0]
    assert "does not yet support DoRA" in caplog.messages[1]
    assert len(caplog.messages) == 2
    write_adapter(folder / "x", manifest)
    said(web, "x")
    assert faults(web) == {}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../secret",
            "..",
            ".",
            "./x",
            "x/../../secret",
            "x/inner",
            "/",
            "//x",
            "x/",
            "x\0",
            "x\n",
        ),
        *(".hidden", "base:", "base:../secret", "base:.hidden", "README.md", "nobody", "é" * 5000),
        *("..\\secret", "%2e%2e/secret", "~", "x@0.5", "(x@1.0,y@1.0)", "x,secret", "\udc00"),
    ],
)
def test_a_name_leads_nowhere_else(
    web: Web, folder: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    write_adapter(folder / "x" / "inner", manifest)
    for path in (folder.parent / "secret", folder / ".hidden"):
        write_adapter(path, manifest)
    (folder / "README.md").write_text("no adapter")
    for asked in (name, str(folder.parent / "secret"), str(folder / "x" / "inner")):
        body = {"prompt": PROMPT, "model": asked}
        if "\udc00" in asked:
            response = web.client.post(
                COMPLETIONS,
                content=b'{"prompt": [1], "model": "\\udc00"}',
                headers={"content-type": "application/json"},
            )
            assert response.status_code in (400, 404)
            continue
        assert web.refusal(COMPLETIONS, 404, **body)["param"] == "model"
        assert web.refusal("/tokenize", 404, **{**body, "prompt": "w1"})["param"] == "model"
    assert names(web) == ["base"]
    assert (faults(web), caplog.messages) == ({}, [])  # whatever clients ask leaves nothing behind


def test_who_pins_or_unloads_it_may_be_the_first(
    spoken: Spoken, folder: Path, manifest: Manifest
) -> None:
    for name in "xy":
        write_adapter(folder / name, manifest)
    with web_server(spoken.config(lora_dir=folder, lora_dir_refresh_s=FAR)) as web:
        assert names(web) == ["base", "x", "y"]
        assert web.client.post(f"{KNOWN}/x/pin").json()["level"] == "slot"
        assert web.client.post(f"{KNOWN}/y/unpin").json()["pinned"] is False
        assert unload(web, "y").status_code == 200
        assert names(web) == ["base", "x"]


# ------------------------------------------------------------------------------------ off the step


@pytest.fixture
def held_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    """The engine reads no adapter of a folder before it may."""
    held, answer = HeldReads(), AdapterDesk.answer

    def late(desk: AdapterDesk, what: str, options: Mapping[str, Any]) -> Any:
        if what == "load" and "/folder/" in options["path"]:
            held.begun.set()
            assert held.may_end.wait(SECONDS)
        return answer(desk, what, options)

    monkeypatch.setattr(AdapterDesk, "answer", late)
    yield held
    held.may_end.set()


def test_first_uses_hold_up_nobody_else(
    make_gated: MakeGated, folder: Path, held_reads: HeldReads
) -> None:
    path = number_file(folder, 4)
    for number in range(10, 20):
        os.link(path, folder / f"{number}.safetensors")
    gated = make_gated(lora_dir=folder, lora_dir_refresh_s=FAR)
    new = sorted(file.name for file in folder.iterdir())
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(said, gated.web, name) for name in [*new, *new[:2]]]
        try:
            assert eventually(lambda: gated.web.load == len(asked))
            for number in (1, 2, 3):
                assert said(gated.web, str(number)) == expected_answer(PROMPT, number, SAMPLING)
            assert "trt_lora:adapters" in gated.web.client.get("/metrics").text
        finally:
            held_reads.may_end.set()
        assert all(a.result() == expected_answer(PROMPT, 4, SAMPLING) for a in asked)
    assert sorted(names(gated.web)) == sorted(["base", *"123", *new])


def test_who_goes_away_leaves_the_first_use_to_others(
    make_gated: MakeGated, folder: Path, held_reads: HeldReads
) -> None:
    number_file(folder, 4)
    gated = make_gated(lora_dir=folder, lora_dir_refresh_s=FAR)
    body = {"prompt": PROMPT, "model": "4.safetensors", **GREEDY}
    with pytest.raises(httpx.ReadTimeout):
        gated.web.client.post(COMPLETIONS, json=body, timeout=0.2)
    assert held_reads.begun.wait(SECONDS)
    assert eventually(lambda: gated.web.load == 0)
    held_reads.may_end.set()
    assert said(gated.web, "4.safetensors") == expected_answer(PROMPT, 4, SAMPLING)


def test_with_no_room_in_memory_its_first_request_waits_for_its_turn(
    make_gated: MakeGated, folder: Path
) -> None:
    """It is not refused as too much: others end, and it is read then."""
    number_file(folder, 4)
    gated = make_gated(
        lora_modules=[], lora_dir=folder, lora_dir_refresh_s=FAR, max_cpu_loras=1, rows=2
    )
    number_file(folder, 5)
    with ThreadPoolExecutor() as pool:
        said(gated.web, "4.safetensors")
        gated.engine.shut()
        first = pool.submit(said, gated.web, "4.safetensors")
        assert eventually(lambda: gated.engine.waits)
        second = pool.submit(said, gated.web, "5.safetensors")
        assert eventually(lambda: "5.safetensors" in names(gated.web))
        gated.engine.let()
        assert first.result() == expected_answer(PROMPT, 4, SAMPLING)
        assert second.result() == expected_answer(PROMPT, 5, SAMPLING)


# ------------------------------------------------------------------------------------ at the start


def test_a_thousand_adapters_are_there_at_once_and_none_is_read(
    spoken: Spoken, folder: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_adapter(folder / "a0", manifest)
    for number in range(1, 1000):
        (folder / f"a{number}").mkdir()
        for file in made.iterdir():
            os.link(file, folder / f"a{number}" / file.name)
    opened: list[Path] = []
    begin, may_check, checked = AdapterFile.__init__, threading.Event(), list[Path]()

    def opening(file: AdapterFile, path: Path) -> None:
        opened.extend([path] if path.is_relative_to(folder) else [])
        begin(file, path)

    def check(path: Path, manifest: Manifest) -> Any:
        assert may_check.wait(SECONDS)
        checked.append(path)
        return load_adapter(path, manifest)

    monkeypatch.setattr(AdapterFile, "__init__", opening)
    monkeypatch.setattr(folder_follower, "load_adapter", check)
    with web_server(spoken.config(lora_dir=folder, lora_dir_refresh_s=FAR)) as web:
        try:
            assert len(names(web)) == 1001
            assert opened == []
            assert len(web.client.get(KNOWN).json()["data"]) == 1000
            said(web, "a7")
            assert {path.parent.name for path in opened} == {"a7"}
        finally:
            may_check.set()
        assert eventually(lambda: len(checked) == 999)  # in the background; not what was used
        assert faults(web) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_dir_refresh_s": 0.0}, "--lora-dir-refresh is 0.0, expected"),
        ({"lora_dir_refresh_s": float("nan")}, "--lora-dir-refresh is nan, expected"),
        ({"lora_dir": Path("/nowhere")}, "--lora-dir: /nowhere cannot be read"),
        ({"lora_dir": Path(__file__)}, "cannot be read; name a folder"),
    ],
)
def test_a_folder_that_is_none_is_refused(
    spoken: Spoken, folder: Path, fields: dict[str, Any], message: str
) -> None:
    config = spoken.config(**{"lora_dir": folder, **fields})
    with pytest.raises(ConfigError, match=message), web_server(config):
        pass


def test_names_of_start_are_not_the_folders(
    spoken: Spoken, folder: Path, manifest: Manifest
) -> None:
    write_adapter(folder / "x", manifest, seed=1)
    modules = [("x", str(spoken.adapters["a"]))]
    config = spoken.config(lora_modules=modules, lora_dir=folder, lora_dir_refresh_s=FAR)
    with web_server(config) as web:
        assert load(web, "y", spoken.adapters["a"]).status_code == 200
        assert names(web) == ["base", "x", "y"]
        assert said(web, "x") == said(web, "y")
        assert load(web, "z", folder / "x").status_code == 200  # a root, too
