"""A folder of adapters is listed and followed: what comes, changes and goes while it is served."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapter_routes import (
    KNOWN,
    PROMPT,
    SAMPLING,
    is_newer,
    load,
    loaded,
    names,
    said,
    unload,
    version,
)
from support.adapter_routes import refused_of_folder as faults
from support.eventually import eventually
from support.served_engines import Spoken, write_adapter
from support.web_server import COMPLETIONS, Web, refused, web_server

from trt_lora.runtime import Engine
from trt_lora.runtime.manifest import Manifest

Publish = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def publish(folder: Path, manifest: Manifest) -> Publish:
    """Let a folder or file appear under its final name, in the place of what has it."""

    def put(name: str, into: Path = folder, **fields: Any) -> Path:
        staged = write_adapter(into / ".new", manifest, **fields)
        if (into / name).exists():
            (into / name).rename(into / ".old")
        staged.rename(into / name)
        shutil.rmtree(into / ".old", ignore_errors=True)
        return into / name

    return put


@pytest.fixture(scope="module")
def web(spoken: Spoken, folder: Path) -> Iterator[Web]:
    """A server that looks into the folder all the time."""
    with web_server(spoken.config(lora_dir=folder, lora_dir_refresh_s=0.02)) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins and ends with nothing there."""
    yield
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if "web" in request.fixturenames:
        web: Web = request.getfixturevalue("web")
        for name in names(web)[1:]:
            unload(web, name)
        assert eventually(lambda: names(web) == ["base"] and not faults(web))


def wait_for_a_look(web: Web, publish: Publish) -> None:
    """What comes after all that is there now has been seen, and so has that."""
    path = publish("~seen")
    assert eventually(lambda: "~seen" in names(web))
    path.rename(path.with_name(".seen"))
    assert eventually(lambda: "~seen" not in names(web))
    shutil.rmtree(path.with_name(".seen"))


def answered(web: Web, engine: Engine, path: Path, model: str) -> bool:
    """Whether a model answers as the adapter at a path does in an engine without HTTP."""
    engine.adapters.load("~it", path, replace=True)
    try:
        (answer,) = engine.generate([PROMPT], adapter="~it", sampling=SAMPLING)
    finally:
        engine.adapters.unload("~it")
    return bool(said(web, model) == list(answer.token_ids))


# ----------------------------------------------------------------------------- comes, changes, goes


def test_what_is_published_is_served_and_what_is_removed_is_not(
    web: Web, twin: Engine, publish: Publish
) -> None:
    path = publish("x", seed=5)
    assert eventually(lambda: names(web) == ["base", "x"])
    unread = web.client.get(f"{KNOWN}/x").json()
    assert (unread["version"], unread["level"], unread["path"]) == (0, "disk", str(path))
    assert unread in web.client.get(KNOWN).json()["data"]
    assert answered(web, twin, path, "x")
    read = web.client.get(f"{KNOWN}/x").json()
    assert read.keys() == unread.keys()
    assert read["version"] > 0
    shutil.rmtree(path)
    assert eventually(lambda: names(web) == ["base"])
    assert web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="x")["param"] == "model"
    assert web.client.get(KNOWN).json()["data"] == []


def test_what_is_replaced_is_another_generation(web: Web, twin: Engine, publish: Publish) -> None:
    assert answered(web, twin, publish("x", seed=1), "x")
    for seed in (2, 3, 4):
        before = version(web, "x")
        path = publish("x", seed=seed)
        assert is_newer(web, "x", before)
        assert answered(web, twin, path, "x")
    (path / "README.md").write_text("no file of the adapter")
    os.link(path / "adapter_model.safetensors", path.parent / "a-backup.bin")
    before = version(web, "x")
    wait_for_a_look(web, publish)
    assert version(web, "x") == before


def test_what_is_written_in_place_is_another_generation(
    web: Web, twin: Engine, publish: Publish, manifest: Manifest
) -> None:
    path = publish("x", seed=1)
    assert answered(web, twin, path, "x")
    before = version(web, "x")
    write_adapter(path, manifest, seed=2)
    assert eventually(lambda: version(web, "x") > before and not faults(web))
    assert answered(web, twin, path, "x")


def test_what_is_replaced_before_its_first_use_is_the_new_one(
    web: Web, twin: Engine, publish: Publish
) -> None:
    publish("x", seed=1)
    wait_for_a_look(web, publish)
    path = publish("x", seed=2)
    wait_for_a_look(web, publish)
    assert answered(web, twin, path, "x")


def test_a_pin_is_kept_when_its_adapter_is_replaced(web: Web, publish: Publish) -> None:
    publish("x", seed=1)
    assert eventually(lambda: "x" in names(web))
    assert web.client.post(f"{KNOWN}/x/pin").json()["level"] == "slot"  # that is its first use
    before = version(web, "x")
    publish("x", seed=2)
    assert is_newer(web, "x", before)
    known = web.client.get(f"{KNOWN}/x").json()
    assert (known["pinned"], known["level"]) == (True, "slot")


def test_a_blend_takes_what_was_never_used(web: Web, publish: Publish) -> None:
    for seed, name in enumerate("xy"):
        publish(name, seed=seed)
    parts = [{"name": "x", "scale": 0.5}, {"name": "y"}]
    web.answer(COMPLETIONS, prompt=PROMPT, lora=parts)
    assert web.refusal(COMPLETIONS, 404, prompt=PROMPT, lora=[*parts, {"name": "z"}])


# ---------------------------------------------------------------------------------- what is no good


def test_what_is_half_written_is_taken_when_it_is_whole(
    web: Web, folder: Path, manifest: Manifest, publish: Publish
) -> None:
    whole = write_adapter(folder / ".whole", manifest)
    content = (whole / "adapter_model.safetensors").read_bytes()
    (folder / "x").mkdir()
    assert eventually(lambda: faults(web) == {"x": "holds no adapter, or not yet"})
    shutil.copy(whole / "adapter_config.json", folder / "x")
    weights = folder / "x" / "adapter_model.safetensors"
    for size in (0, 5, len(content) // 2):
        weights.write_bytes(content[:size])
        wait_for_a_look(web, publish)
        assert eventually(lambda: faults(web).keys() == {"x"})
        assert web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="x")["param"] == "model"
        assert names(web) == ["base"]
    weights.write_bytes(content)
    assert eventually(lambda: "x" in names(web) and not faults(web))
    said(web, "x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"rank": 32}, "rank 32"), ({"use_dora": True}, "DoRA"), ({"r": "much"}, "r")],
)
def test_what_is_bad_is_logged_once_and_shown_and_tried_when_it_changes(
    web: Web,
    publish: Publish,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        path = publish("x", **fields)
        assert eventually(lambda: faults(web).keys() == {"x"})
        wait_for_a_look(web, publish)
    assert words in faults(web)["x"]
    assert str(path.parent) not in faults(web)["x"]
    (line,) = [record.getMessage() for record in caplog.records if "'x'" in record.getMessage()]
    assert line.startswith("adapter 'x' is not served: ")
    assert names(web) == ["base"]
    web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="x")
    said(web, "base")
    publish("x")
    assert eventually(lambda: names(web) == ["base", "x"] and not faults(web))


def test_a_bad_replacement_leaves_the_old_one(web: Web, twin: Engine, publish: Publish) -> None:
    old = shutil.copytree(publish("x", seed=1), publish("x", seed=1).parent / ".kept")
    assert answered(web, twin, old, "x")
    for fields in ({"rank": 32}, {"use_dora": True}):
        publish("x", **fields)
        wait_for_a_look(web, publish)
        assert faults(web).keys() == {"x"}
        assert answered(web, twin, old, "x")
    path = publish("x", seed=2)
    assert eventually(lambda: not faults(web))
    assert answered(web, twin, path, "x")


ODD = ("a,b", "x@2", "base", "x..y", "new\nline", "back\\slash", "é" * 127 + "xx", "\udcff")


def test_names_that_cannot_be_are_passed_over_with_a_line(
    web: Web, folder: Path, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for name in ODD[:-2]:
            publish(name)
        (folder / "\udcff").mkdir()  # a name that is no text
        (folder / ".hidden").mkdir()
        (folder / "README.md").write_text("no adapter")
        publish("good")
        assert eventually(lambda: names(web) == ["base", "good"])
        wait_for_a_look(web, publish)
    assert faults(web).keys() == {*ODD[:-2], "?"}
    assert len(caplog.records) == len(ODD) - 1
    assert all("\n" not in record.getMessage() for record in caplog.records)
    said(web, "good")


# --------------------------------------------------------------------------------- who has the name


def test_what_was_unloaded_over_http_stays_away_until_it_changes(
    web: Web, twin: Engine, publish: Publish
) -> None:
    publish("x", seed=1)
    for is_used in (False, True):
        assert eventually(lambda: "x" in names(web))
        if is_used:
            said(web, "x")
        assert unload(web, "x").status_code == 200
        wait_for_a_look(web, publish)
        assert names(web) == ["base"]
        web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="x")
        path = publish("x", seed=2 + is_used)
    assert eventually(lambda: "x" in names(web))
    assert answered(web, twin, path, "x")


def test_what_somebody_has_loaded_is_not_replaced(
    web: Web, spoken: Spoken, twin: Engine, publish: Publish
) -> None:
    path = spoken.adapters["a"]
    before = loaded(web, "x", path)["version"]
    publish("x", seed=1)
    wait_for_a_look(web, publish)
    publish("x", seed=2)
    wait_for_a_look(web, publish)
    assert version(web, "x") == before
    assert answered(web, twin, path, "x")


def test_who_loads_in_place_takes_the_name_over(
    web: Web, spoken: Spoken, twin: Engine, publish: Publish
) -> None:
    path = publish("x", seed=1)
    assert eventually(lambda: "x" in names(web))
    assert "already been loaded" in refused(load(web, "x", path), 400)["message"]
    for _ in range(2):
        assert load(web, "x", spoken.adapters["a"], load_inplace=True).status_code == 200
        wait_for_a_look(web, publish)
        assert answered(web, twin, spoken.adapters["a"], "x")
        publish("x", seed=2)
    shutil.rmtree(path)
    wait_for_a_look(web, publish)
    assert names(web) == ["base", "x"]


# ----------------------------------------------------------------------------------- where it leads


def test_links_out_of_the_folder_are_not_followed(
    web: Web, spoken: Spoken, folder: Path, publish: Publish, manifest: Manifest, tmp_path: Path
) -> None:
    outside = write_adapter(tmp_path / "outside", manifest)
    (folder / "out").symlink_to(outside)
    (folder / "loop").symlink_to("loop")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "root").symlink_to(spoken.adapters["a"])  # below --lora-root
    write_adapter(folder / ".versions" / "1", manifest)
    (folder / "in").symlink_to(".versions/1")
    wait_for_a_look(web, publish)
    assert sorted(names(web)) == ["base", "in", "root"]  # listed in the order of their sight
    assert faults(web).keys() == {"out", "loop", "nothing"}
    for name in ("in", "root"):
        said(web, name)
    for name in ("out", "loop", "nothing"):
        web.refusal(COMPLETIONS, 404, prompt=PROMPT, model=name)
    shutil.move(folder / ".versions", tmp_path)  # and back as a link of one file
    wait_for_a_look(web, publish)
    assert "in" not in names(web)
    path = publish("file")
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert eventually(lambda: "file" in faults(web))
    assert "leads out" in faults(web)["file"]
    web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="file")


def test_a_link_that_is_moved_is_a_replacement(
    web: Web, folder: Path, publish: Publish, manifest: Manifest, twin: Engine
) -> None:
    paths = [write_adapter(folder / f".{seed}", manifest, seed=seed) for seed in (1, 2)]
    (folder / "x").symlink_to(".1")
    assert answered(web, twin, paths[0], "x")
    before = version(web, "x")
    (folder / ".link").symlink_to(".2")
    (folder / ".link").rename(folder / "x")
    assert is_newer(web, "x", before)
    assert answered(web, twin, paths[1], "x")
