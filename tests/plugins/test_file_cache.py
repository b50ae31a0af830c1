"""What is kept in files comes back as it was, or not at all, and stays within its limit."""

import os
from pathlib import Path

import pytest

from trt_lora.plugins.file_cache import FileCache

OVERHEAD = 32  # bytes of a file that are not content: its digest


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    """Room for three entries of 100 bytes."""
    return FileCache(tmp_path / "cache", 3 * (100 + OVERHEAD))


def fill(cache: FileCache, *keys: str) -> None:
    """Put entries that were used one second after another, long ago."""
    for second, key in enumerate(keys):
        cache.put(key, key.encode() * 100)
        os.utime(cache.directory / key, (second, second))


def keys_of(cache: FileCache) -> set[str]:
    return {path.name for path in cache.directory.iterdir()}


def test_what_was_put_is_returned_and_what_was_not_is_none(cache: FileCache) -> None:
    assert cache.get("a") is None
    cache.put("a", b"content")
    assert cache.get("a") == b"content"
    cache.put("a", b"another")
    assert FileCache(cache.directory, 1).get("a") == b"another"


@pytest.mark.parametrize("damage", [b"", b"x" * 10, b"x" * 100])
def test_a_damaged_entry_is_absent_until_it_is_put_again(cache: FileCache, damage: bytes) -> None:
    cache.put("a", b"content")
    (cache.directory / "a").write_bytes(damage)
    assert cache.get("a") is None
    cache.put("a", b"content")
    assert cache.get("a") == b"content"


def test_the_entry_used_longest_ago_goes_when_there_is_no_room(cache: FileCache) -> None:
    fill(cache, "a", "b", "c")
    assert cache.get("a")
    cache.put("d", b"d" * 100)
    assert keys_of(cache) == {"a", "c", "d"}


def test_many_small_entries_go_for_a_large_one(cache: FileCache) -> None:
    fill(cache, "a", "b", "c")
    cache.put("d", b"d" * 200)
    assert keys_of(cache) == {"c", "d"}


def test_an_entry_larger_than_the_limit_is_not_kept(cache: FileCache) -> None:
    cache.put("a", b"a" * 1000)
    assert cache.get("a") is None
    assert keys_of(cache) == set()


def test_a_directory_that_cannot_be_made_keeps_nothing_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    cache = FileCache(tmp_path / "file" / "cache", 1000)
    cache.put("a", b"content")
    assert cache.get("a") is None


def test_a_write_that_fails_leaves_the_entry_before_it(
    cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("a", b"content")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        cache.put("a", b"another")
    assert cache.get("a") == b"content"
    assert keys_of(cache) == {"a"}
