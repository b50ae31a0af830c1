"""What is published appears whole, replaces nothing that it may not, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from trt_lora.plugins.atomic_files import publish_directory, publish_file
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.scratch import RETIRED, scratch_directory

# Publishes a directory; waits in the middle of it.
BUILD = """
import sys
from pathlib import Path
from trt_lora.plugins.atomic_files import publish_directory
with publish_directory(Path(sys.argv[1])) as work:
    (work / "weights").write_bytes(bytes(1000))
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def build_under_way(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of publishing a directory; its input ends it."""
    command = [sys.executable, "-c", BUILD, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        if process.poll() is None:
            process.communicate(timeout=60)


def publish(
    directory: Path,
    text: str = "new",
    *,
    may_replace: bool = True,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Publish a directory with one file; `meanwhile` is what happens before it appears."""
    with publish_directory(directory, lambda path: may_replace) as work:
        (work / "file").write_text(text)
        meanwhile()


def names(folder: Path) -> list[str]:
    """What is in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("target", ["engine", "other"])
def test_what_a_killed_process_left_is_removed_by_the_next_one_here(
    target: str, tmp_path: Path
) -> None:
    with build_under_way(tmp_path / "engine") as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    (abandoned,) = tmp_path.glob(".engine.*")
    assert (abandoned / "engine" / "weights").is_file()
    publish(tmp_path / target)
    assert names(tmp_path) == [target]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    with build_under_way(tmp_path / "slow"):
        publish(tmp_path / "fast")
        (scratch,) = tmp_path.glob(".slow.*")
        assert (scratch / "slow" / "weights").is_file()
    assert names(tmp_path) == ["fast", "slow"]


def test_two_at_a_time_in_one_process_do_not_remove_each_other(tmp_path: Path) -> None:
    with publish_directory(tmp_path / "one") as one:
        publish(tmp_path / "two")
        (one / "file").write_text("one")
    assert names(tmp_path) == ["one", "two"]


def test_hidden_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with scratch_directory(tmp_path / "x") as scratch:
        (marker,) = scratch.iterdir()
    (elsewhere / "mine").mkdir(parents=True)
    (elsewhere / marker.name).touch()
    folder = tmp_path / "folder"
    (folder / ".engine.abc").mkdir(parents=True)
    (folder / ".engine.abc" / "file").touch()
    (folder / ".engine.link").symlink_to(elsewhere)
    (folder / ".engine.file").mkdir()
    (folder / ".engine.file" / marker.name).symlink_to(elsewhere / marker.name)
    (folder / ".engine.pipe").mkdir()
    os.mkfifo(folder / ".engine.pipe" / marker.name)
    (folder / "engine.abc").mkdir()
    (folder / "engine.abc" / marker.name).touch()
    before = names(folder)
    publish(folder / "engine")
    assert names(folder) == sorted([*before, "engine"])
    assert names(elsewhere) == sorted(["mine", marker.name])


def test_what_was_being_replaced_when_the_process_died_is_put_back(tmp_path: Path) -> None:
    with scratch_directory(tmp_path / "engine") as scratch:
        (marker,) = scratch.iterdir()
    for target in ("engine", "other"):
        (tmp_path / f".{target}.abc" / RETIRED).mkdir(parents=True)
        (tmp_path / f".{target}.abc" / RETIRED / "file").write_text("old")
        (tmp_path / f".{target}.abc" / marker.name).touch()
    (tmp_path / "other").mkdir()
    publish(tmp_path / "third")
    assert names(tmp_path) == ["engine", "other", "third"]
    assert (tmp_path / "engine" / "file").read_text() == "old"
    assert names(tmp_path / "other") == []


def make_directory(path: Path) -> None:
    """Make a directory that is not empty."""
    path.mkdir()
    (path / "mine").write_text("mine")


@pytest.mark.parametrize(
    "appear",
    [
        make_directory,
        Path.mkdir,
        Path.touch,
        lambda path: path.symlink_to("nowhere"),
    ],
    ids=["directory", "empty directory", "file", "link to nothing"],
)
def test_what_appears_meanwhile_and_may_not_go_stays_and_the_result_is_kept(
    appear: Callable[[Path], object], tmp_path: Path
) -> None:
    target = tmp_path / "engine"
    (tmp_path / "engine-2").mkdir()
    with pytest.raises(ConfigError, match=r"engine appeared .* is .*engine-3: move it"):
        publish(target, may_replace=False, meanwhile=lambda: appear(target))
    assert names(tmp_path) == ["engine", "engine-2", "engine-3"]
    assert (tmp_path / "engine-3" / "file").read_text() == "new"
    assert not (target / "file").exists()


def test_what_appears_between_the_look_and_the_rename_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(ConfigError, match="appeared in the meantime"):
        publish(target, may_replace=False, meanwhile=lambda: make_directory(target))
    assert names(target) == ["mine"]
    assert (tmp_path / "engine-2" / "file").read_text() == "new"


def test_what_may_go_is_replaced(tmp_path: Path) -> None:
    publish(tmp_path / "engine", "old")
    (tmp_path / "engine" / "more").touch()
    publish(tmp_path / "engine", meanwhile=lambda: (tmp_path / "engine" / "late").touch())
    assert names(tmp_path) == ["engine"]
    assert names(tmp_path / "engine") == ["file"]
    assert (tmp_path / "engine" / "file").read_text() == "new"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with publish_file(tmp_path / "file") as work:
        work.write_text("new")
        assert not (tmp_path / "file").exists()
    with suppress(KeyboardInterrupt), publish_file(tmp_path / "file") as work:
        work.write_text("newer")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "new"


def test_ctrl_c_the_moment_the_scratch_directory_is_there_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def made_then_interrupted(path: Path, mode: int) -> None:
        make(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.mkdir", made_then_interrupted)
    with pytest.raises(KeyboardInterrupt), scratch_directory(tmp_path / "engine"):
        pass
    assert names(tmp_path) == []


def test_an_error_names_the_place_that_was_asked_for(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "engine"
    with pytest.raises(FileNotFoundError) as missing, publish_file(file):
        pass  # nothing was written
    assert missing.value.filename == str(file)
    with pytest.raises(FileNotFoundError) as inside, publish_directory(folder) as work:
        (work / "a" / "b").touch()
    assert inside.value.filename == str(folder / "a" / "b")
    with pytest.raises(FileNotFoundError) as elsewhere, scratch_directory(file) as scratch:
        os.remove(tmp_path / "other")
    assert elsewhere.value.filename == str(tmp_path / "other")
    with pytest.raises(OSError, match="9 requested and 5 written"), scratch_directory(file):
        raise OSError("9 requested and 5 written")  # as numpy says of a full disk
    with pytest.raises(FileExistsError) as itself, scratch_directory(file) as scratch:
        scratch.mkdir()
    assert itself.value.filename == str(file)
