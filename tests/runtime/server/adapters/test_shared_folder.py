"""A folder of adapters under requests, under two servers, and away for a while."""

import asyncio
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from support.adapter_routes import GREEDY, KNOWN, PROMPT, SAMPLING, is_newer, names, said, version
from support.eventually import eventually
from support.fakes.slot_engine import expected_answer, number_file
from support.served_engines import Gated, MakeGated, Spoken, write_adapter
from support.web_server import COMPLETIONS, web_server

from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder, Found
from trt_lora.runtime.server.adapters.folder_follower import FolderFollower
from trt_lora.runtime.server.adapters.offered_adapters import OfferedAdapters

SOON = 0.02  # seconds from one look to the next
X = "x.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


def publish(folder: Path, number: int) -> None:
    """Let the adapter of a number be `X` at once."""
    number_file(folder.parent, number).rename(folder / X)


def in_memory(gated: Gated) -> int:
    """How many adapters have memory, their slots aside."""
    text = gated.web.client.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("trt_lora:adapters{")]
    return sum(int(float(line.split()[-1])) for line in lines if 'level="disk"' not in line)


def running(gated: Gated) -> bool:
    """Whether `X` answers, after one step more."""
    gated.engine.let(1)
    return bool(gated.web.client.get(f"{KNOWN}/{X}").json()["running"])


def test_what_is_removed_ends_its_answers_and_frees_its_memory(
    make_gated: MakeGated, folder: Path
) -> None:
    publish(folder, 4)
    gated = make_gated(lora_modules=[], lora_dir=folder, lora_dir_refresh_s=SOON)
    said(gated.web, X)
    assert in_memory(gated) == 1
    gated.engine.shut()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(said, gated.web, X)
        assert eventually(lambda: running(gated))
        (folder / X).unlink()
        assert eventually(lambda: names(gated.web) == ["base"])
        gated.web.refusal(COMPLETIONS, 404, prompt=PROMPT, model=X)
        assert not answer.done()
        gated.engine.let()
        assert answer.result() == expected_answer(PROMPT, 4, SAMPLING)
    assert eventually(lambda: in_memory(gated) == 0)


def test_who_runs_keeps_the_old_one_and_who_waits_has_the_new_one(
    make_gated: MakeGated, folder: Path
) -> None:
    publish(folder, 4)
    gated = make_gated(lora_modules=[], lora_dir=folder, lora_dir_refresh_s=SOON, rows=1)
    said(gated.web, X)
    before = version(gated.web, X)
    gated.engine.shut()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(said, gated.web, X)
        assert eventually(lambda: running(gated))
        second = pool.submit(said, gated.web, X)
        assert eventually(lambda: gated.web.load == 2)
        publish(folder, 5)
        assert is_newer(gated.web, X, before)
        gated.engine.let()
        assert first.result() == expected_answer(PROMPT, 4, SAMPLING)
        assert second.result() == expected_answer(PROMPT, 5, SAMPLING)
    assert eventually(lambda: in_memory(gated) == 1)


def test_no_answer_is_of_an_old_one_while_it_is_replaced_again_and_again(
    make_gated: MakeGated, folder: Path
) -> None:
    publish(folder, 4)
    gated = make_gated(lora_modules=[], lora_dir=folder, lora_dir_refresh_s=SOON)
    said(gated.web, X)  # else the first one is read at any time, and is newer than none
    ends, wrong = threading.Event(), list[object]()
    answers = [expected_answer(PROMPT, number, SAMPLING) for number in range(4, 20)]

    def ask() -> None:
        newest = 0
        while not ends.is_set():
            found = answers.index(said(gated.web, X))
            wrong.extend([(found, newest)] if found < newest else [])
            newest = found

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in "ab"]
        try:
            for number in range(5, 20):
                before = version(gated.web, X)
                publish(folder, number)
                assert is_newer(gated.web, X, before)
                assert said(gated.web, X) == answers[number - 4]
        finally:
            ends.set()
        for each in asking:
            each.result()
    assert wrong == []
    assert eventually(lambda: in_memory(gated) == 1)


def test_what_is_not_in_memory_is_replaced_too(
    spoken: Spoken, folder: Path, manifest: Manifest
) -> None:
    """It is read again when it is wanted, and is the new one then."""
    for seed, name in enumerate("xyz"):
        write_adapter(folder / name, manifest, seed=seed, rank=16)
    config = spoken.config(
        lora_dir=folder, lora_dir_refresh_s=SOON, lora_roots=[], max_cpu_loras=1, max_loras=1
    )
    with web_server(config) as web:
        old = {name: said(web, name) for name in "xyz"}
        known = web.client.get(f"{KNOWN}/x").json()
        assert known["level"] == "disk"
        new = write_adapter(folder / ".x", manifest, seed=9, rank=16)
        (folder / "x").rename(folder / ".old")
        new.rename(folder / "x")
        assert is_newer(web, "x", known["version"])
        assert web.client.get(f"{KNOWN}/x").json()["level"] == "disk"
        assert said(web, "x") not in old.values()
        assert [said(web, name) for name in "yz"] == [old["y"], old["z"]]


# -------------------------------------------------------------------------------------- two servers


def test_two_servers_follow_one_folder(spoken: Spoken, folder: Path, manifest: Manifest) -> None:
    write_adapter(folder / "x", manifest, seed=1)
    config = spoken.config(lora_dir=folder, lora_dir_refresh_s=SOON, lora_roots=[])
    with web_server(config) as one, web_server(config) as other:
        both = (one, other)
        first = {str(said(web, "x")) for web in both}
        assert len(first) == 1
        versions = [version(web, "x") for web in both]
        write_adapter(folder / ".new", manifest, seed=2)
        (folder / "x").rename(folder / ".old")
        (folder / ".new").rename(folder / "x")
        assert all(is_newer(web, "x", than) for web, than in zip(both, versions, strict=True))
        second = {str(said(web, "x")) for web in both}
        assert len(second) == 1
        assert second != first
        hashes = {web.client.get(f"{KNOWN}/x").json()["sha256"] for web in both}
        assert len(hashes) == 1
        (folder / "x").rename(folder / ".gone")
        assert eventually(lambda: all(names(web) == ["base"] for web in both))


# --------------------------------------------------------------------------------------------- away


def test_a_folder_that_is_away_takes_nothing_with_it(
    spoken: Spoken, folder: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, name in enumerate("xy"):
        write_adapter(folder / name, manifest, seed=seed)
    config = spoken.config(lora_dir=folder, lora_dir_refresh_s=SOON, lora_roots=[])
    with caplog.at_level(logging.WARNING), web_server(config) as web:
        before = said(web, "x")
        away = folder.rename(folder.with_name("away"))
        assert eventually(lambda: any("is away" in line for line in caplog.messages))
        assert names(web) == ["base", "x", "y"]
        assert said(web, "x") == before
        web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="z")
        write_adapter(away / "z", manifest)
        shutil.rmtree(away / "y")
        away.rename(folder)
        assert eventually(lambda: names(web) == ["base", "x", "z"])
        assert said(web, "x") == before
    assert len([line for line in caplog.messages if "is away" in line]) == 1
    assert len([line for line in caplog.messages if "is there again" in line]) == 1


def test_an_empty_mount_point_is_no_empty_folder(tmp_path: Path, manifest: Manifest) -> None:
    """Where a device was mounted, an empty folder of another one is left."""
    write_adapter(tmp_path / "mounted" / "x", manifest)
    link, unmounted = tmp_path / "link", Path(f"/dev/shm/empty-{os.getpid()}")
    link.symlink_to("mounted")
    unmounted.mkdir()
    try:
        assert unmounted.stat().st_dev != tmp_path.stat().st_dev
        folder = AdapterFolder(link, [])
        assert folder.look().keys() == {"x"}
        link.unlink()
        link.symlink_to(unmounted)
        with pytest.raises(OSError, match="it was unmounted"):
            folder.look()
        (unmounted / "y").mkdir()
        assert folder.look().keys() == {"y"}  # another device, and not empty
        (unmounted / "y").rmdir()
        assert folder.look() == {}
    finally:
        shutil.rmtree(unmounted)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_folder_that_goes_while_it_is_looked_at_is_not_an_empty_one(
    folder: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, *, comes_back: bool
) -> None:
    write_adapter(folder / "x", manifest)
    listed = os.listdir

    def goes(path: Path) -> list[str]:
        names = listed(path)
        folder.rename(folder.with_name("away"))
        if comes_back:
            folder.mkdir()
        return names

    monkeypatch.setattr(os, "listdir", goes)
    with pytest.raises(OSError, match="was replaced" if comes_back else "No such file"):
        AdapterFolder(folder, []).look()


def test_a_server_may_begin_with_an_empty_folder(folder: Path) -> None:
    assert AdapterFolder(folder, []).look() == {}
    assert AdapterFolder(folder, []).find("x") is None


def test_a_first_use_of_what_has_gone_is_told_so(
    spoken: Spoken, folder: Path, manifest: Manifest
) -> None:
    write_adapter(folder / "x", manifest)
    with web_server(spoken.config(lora_dir=folder, lora_dir_refresh_s=3600.0)) as web:
        shutil.rmtree(folder / "x")
        web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="x", **GREEDY)
        assert names(web) == ["base"]


class Offers:
    """A request asks for a name at the moment in which it is offered."""

    def __init__(self) -> None:
        self.follower: FolderFollower | None = None
        self.found: list[Path | None] = []

    async def offer(self, name: str, path: Path) -> None:
        assert self.follower is not None
        self.found.append(await self.follower.resolve("base", name))

    def is_unread(self, name: str) -> bool:
        return False


def test_what_is_offered_at_this_moment_is_found(folder: Path, manifest: Manifest) -> None:
    """It is seen already, and has no name yet."""
    path, offers = write_adapter(folder / "x", manifest), Offers()

    async def follow() -> Path | None:
        offers.follower = FolderFollower(
            AdapterFolder(folder, []), cast("OfferedAdapters", offers), manifest, 3600.0
        )
        await offers.follower.start()
        later = await offers.follower.resolve("base", "x")
        await offers.follower.close()
        return later

    assert asyncio.run(follow()) is None  # then it is for who took its name away to say
    assert offers.found == [path]


class Looks(AdapterFolder):
    """A folder between two renames at its second look, and empty from its fourth on."""

    def __init__(self, folder: Path) -> None:
        """Show one adapter, and later another under its name."""
        super().__init__(folder, [])
        old, new = Found(folder / "old"), Found(folder / "new")
        self.shown = [{"x": old}, {}, {"x": new}]

    def look(self) -> dict[str, Found]:
        return self.shown.pop(0) if self.shown else {}


class Told:
    """What a follower says, in its order."""

    def __init__(self) -> None:
        """Nothing was said."""
        self.said: list[str] = []
        self.is_withdrawn = asyncio.Event()

    async def offer(self, name: str, path: Path) -> None:
        self.said.append(f"{name} is {path.name}")

    async def withdraw(self, name: str) -> None:
        self.said.append(f"{name} is gone")
        self.is_withdrawn.set()

    def is_unread(self, name: str) -> bool:
        return False


def test_a_look_between_the_two_renames_of_a_replacement_takes_nothing_away(
    folder: Path, manifest: Manifest
) -> None:
    """Its pin would be lost, and an answer refused."""

    async def follow() -> list[str]:
        told = Told()
        follower = FolderFollower(Looks(folder), cast("OfferedAdapters", told), manifest, 0.001)
        await follower.start()
        await asyncio.wait_for(told.is_withdrawn.wait(), 10)
        await follower.close()
        return told.said

    assert asyncio.run(follow()) == ["x is old", "x is new", "x is gone"]
