"""Who has a file open for writing: known on file systems of this machine, to the file's owner."""

import os
from pathlib import Path

import pytest

from trt_lora.runtime.files import file_writers
from trt_lora.runtime.files.file_writers import open_for_writing


def told(path: Path) -> bool | None:
    with path.open("rb") as file:
        return open_for_writing(file.fileno())


def test_a_writer_is_seen_until_it_closes_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert told(tmp_path / "file") is False
    with (tmp_path / "file").open("r+b"):
        assert told(tmp_path / "file") is True
    with (tmp_path / "file").open("rb"):
        assert told(tmp_path / "file") is False


def test_the_lease_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        assert open_for_writing(file.fileno()) is False
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails where there is a lease
        os.close(descriptor)


def test_a_network_file_system_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr(file_writers, "_is_local", lambda _: False)
    with (tmp_path / "file").open("r+b"):
        assert told(tmp_path / "file") is None


@pytest.mark.parametrize(("kind", "expected"), [("nfs4", None), ("tmpfs", True)])
def test_a_file_system_without_a_disk_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool | None
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    minor = os.minor((tmp_path / "file").stat().st_dev)
    mount = f"30 1 0:{minor} / /data rw shared:1 - {kind} server:/data rw\n"
    monkeypatch.setattr(os, "major", lambda _: 0)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mount)
    with (tmp_path / "file").open("r+b"):
        assert told(tmp_path / "file") is expected
