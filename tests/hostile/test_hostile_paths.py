"""Hostile names and links cannot reach outside an adapter's directory."""

import os
from pathlib import Path

import pytest
from hostile.limits import SECONDS, assert_refused, sharded, within
from hostile.targets import (
    CONFIG,
    SHARD,
    encoded,
    index_of,
    load,
    manifest_fields,
    npy_bytes,
    peft_weights,
    trtllm_arrays,
    write,
)
from safetensors.numpy import save
from support.adapters.manager_setup import manager_with, pair

from trt_lora.plugins.errors import AdapterError, ManifestError
from trt_lora.runtime.adapters.formats.peft import INDEX_FILE, WEIGHTS_FILE
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.adapters.formats.trtllm import TRTLLM_CONFIG, TRTLLM_WEIGHTS
from trt_lora.runtime.manifest import read_manifest


@pytest.mark.parametrize("name", ["../secret.safetensors", "a/../../secret.safetensors", "{}"])
def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    secret = write(tmp_path, {"secret.safetensors": peft_weights()}) / "secret.safetensors"
    assert_refused(sharded(tmp_path / "adapter", name.format(secret)), "leads out of the adapter")


@pytest.mark.parametrize("name", ["", ".", "..", "\0", "\ud800", "x" * 300, "nowhere", 1, None, []])
def test_an_index_must_name_files(tmp_path: Path, name: object) -> None:
    assert_refused(sharded(tmp_path / "adapter", name))


def test_an_index_that_names_shards_of_the_directory_is_accepted(tmp_path: Path) -> None:
    write(sharded(tmp_path, SHARD), {SHARD: peft_weights()})
    manager_with().load_weights("a", tmp_path)


def test_an_index_that_names_a_tensor_no_file_holds_is_refused(tmp_path: Path) -> None:
    write(sharded(tmp_path, SHARD, SHARD), {SHARD: peft_weights()})
    assert_refused(tmp_path, "names 1 tensors that its files do not hold")


DIRECTORIES = {
    "peft": {CONFIG_FILE: encoded(CONFIG), WEIGHTS_FILE: peft_weights()},
    "sharded": {
        CONFIG_FILE: encoded(CONFIG),
        INDEX_FILE: encoded(index_of(SHARD)),
        SHARD: peft_weights(),
    },
    "trtllm": dict(
        zip((TRTLLM_WEIGHTS, TRTLLM_CONFIG), map(npy_bytes, trtllm_arrays()), strict=True)
    ),
    "edgellm": {"processed_adapter_model.safetensors": save(pair())},
}
FILES = [(layout, name) for layout, files in DIRECTORIES.items() for name in files]


@pytest.mark.parametrize(("layout", "name"), FILES)
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, layout: str, name: str) -> None:
    directory = write(tmp_path / "adapter", DIRECTORIES[layout])
    manager_with().load_weights("valid", directory)
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    with pytest.raises(AdapterError, match="leads out of the adapter") as caught:
        manager_with().load_weights("hostile", directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(("layout", "name"), FILES)
def test_a_link_within_the_directory_is_followed(tmp_path: Path, layout: str, name: str) -> None:
    directory = write(tmp_path / "adapter", DIRECTORIES[layout])
    (directory / name).rename(directory / "data")
    (directory / name).symlink_to("data")
    manager_with().load_weights("a", directory)


@pytest.mark.parametrize(("layout", "name"), FILES)
@pytest.mark.parametrize("place", ["pipe", "directory", "link to itself", "link to nothing"])
def test_what_is_no_file_is_refused(tmp_path: Path, layout: str, name: str, place: str) -> None:
    directory = write(tmp_path / "adapter", DIRECTORIES[layout])
    no_file(directory / name, place)
    assert_refused(directory)


@pytest.mark.parametrize("name", ["a.safetensors", "a.onnx_adapter"])
@pytest.mark.parametrize("place", ["pipe", "directory", "link to itself", "link to nothing"])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, name: str, place: str) -> None:
    no_file(tmp_path / name, place)
    assert_refused(tmp_path / name)


@pytest.mark.parametrize("place", ["pipe", "directory", "link to itself", "link to nothing"])
@pytest.mark.parametrize("name", ["manifest.json", "engine.plan"])
def test_an_engine_s_files_must_be_files(tmp_path: Path, name: str, place: str) -> None:
    files = {"manifest.json": encoded(manifest_fields()), "engine.plan": b"not really a plan"}
    no_file(write(tmp_path, files) / name, place)
    with within(SECONDS), pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path) in str(caught.value)


def no_file(path: Path, place: str) -> None:
    path.unlink(missing_ok=True)
    if place == "pipe":
        os.mkfifo(path)
    elif place == "directory":
        path.mkdir()
    else:
        path.symlink_to(path.name if place == "link to itself" else "nowhere")


def cached(root: Path, layout: str, snapshot: str) -> Path:
    """The files as the cache of the Hugging Face hub lays them out."""
    directory, blobs = root / "snapshots" / snapshot, root / "blobs"
    blobs.mkdir(parents=True)
    directory.mkdir(parents=True)
    for name, data in DIRECTORIES[layout].items():
        (blobs / f"{len(name):064x}").write_bytes(data)
        up = "/".join([".."] * (len(Path(snapshot).parts) + 1))
        (directory / name).symlink_to(f"{up}/blobs/{len(name):064x}")
    return directory


@pytest.mark.parametrize("layout", DIRECTORIES)
@pytest.mark.parametrize("snapshot", ["0123abcd", "0123abcd/checkpoint-1"])
def test_the_cache_of_the_hub_is_accepted(tmp_path: Path, layout: str, snapshot: str) -> None:
    manager_with().load_weights("a", cached(tmp_path / "models--a--b", layout, snapshot))


def test_a_snapshot_cannot_reach_another_repository(tmp_path: Path) -> None:
    directory = cached(tmp_path / "models--a--b", "peft", "0123abcd")
    other = cached(tmp_path / "models--c--d", "peft", "0123abcd").parent.parent / "blobs"
    (directory / WEIGHTS_FILE).unlink()
    (directory / WEIGHTS_FILE).symlink_to(other / f"{len(WEIGHTS_FILE):064x}")
    assert_refused(directory, "leads out of the adapter")


def test_a_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", DIRECTORIES["peft"])
    (tmp_path / "link").symlink_to("real")
    load(tmp_path / "link")
    manager_with().load_weights("a", tmp_path / "link")
