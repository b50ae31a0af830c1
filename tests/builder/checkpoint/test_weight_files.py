"""The files of the weights: all of them, whole, and not quantised."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import (
    INDEX_FILE,
    POINTER,
    WEIGHTS_FILE,
    Q,
    Weights,
    check_loads,
    halves,
    pickled,
    refusal,
    weights_of,
    with_file,
    with_shards,
    with_weights,
)

from trt_lora.builder.checkpoint.base_model import fingerprint
from trt_lora.builder.checkpoint.checkpoint import Checkpoint

# ---------------------------------------------------------------------- the files of the weights


def test_shards_load(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    check_loads(directory, weights_of(model))
    assert fingerprint(Checkpoint(directory)) == fingerprint(Checkpoint(model))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_checkpoint_loads(model: Path, tmp_path: Path, zipped: bool) -> None:
    directory = pickled(model, tmp_path / "m")
    torch.save(
        weights_of(model),
        directory / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    check_loads(directory, weights_of(model))


def test_pickled_shards_load(model: Path, tmp_path: Path) -> None:
    directory = pickled(model, tmp_path / "m")
    (directory / "pytorch_model.bin").unlink()
    homes: dict[str, str] = {}
    for number, weights in enumerate(halves(model).values()):
        torch.save(weights, directory / f"part{number}.bin")
        homes |= dict.fromkeys(weights, f"part{number}.bin")
    index = {"metadata": {}, "weight_map": homes}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check_loads(directory, weights_of(model))


def test_weights_that_are_not_loaded_do_not_count_in_the_fingerprint(
    model: Path, tmp_path: Path
) -> None:
    data = (model / WEIGHTS_FILE).read_bytes()
    directory = with_file(model, tmp_path / "m", "consolidated.safetensors", data)
    assert fingerprint(Checkpoint(directory)) == fingerprint(Checkpoint(model))


def test_missing_shards_are_refused(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    (directory / "model-00002-of-00002.safetensors").unlink()
    message = refusal(directory)
    assert "names 1 files that are not there: model-00002-of-00002.safetensors" in message


def test_a_shard_that_the_index_does_not_name_is_refused(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    index = json.loads((directory / INDEX_FILE).read_text())
    first = {k: v for k, v in index["weight_map"].items() if "00001" in v}
    (directory / INDEX_FILE).write_text(json.dumps(index | {"weight_map": first}))
    assert "are missing (" in refusal(directory)


def test_a_weight_of_two_values_in_two_shards_is_refused(model: Path, tmp_path: Path) -> None:
    shards = halves(model)
    first, second = shards.values()
    name = next(iter(first))
    directory = with_shards(model, tmp_path / "m", shards)
    assert fingerprint(Checkpoint(directory))
    second[name] = first[name] + 1
    shutil.rmtree(directory)
    assert f"does not give {name} the values that" in refusal(with_shards(model, directory, shards))


def test_two_sets_of_weights_are_refused(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    shutil.copyfile(model / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    assert "two sets of weights, model.safetensors and the shards of" in refusal(directory)


def test_an_index_that_is_left_over_is_not_read(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    for shard in directory.glob("model-*"):
        shard.unlink()
    shutil.copyfile(model / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    check_loads(directory, weights_of(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a list, not an object"),
        ("{", "is not JSON"),
        ("{}", "weight_map is None, expected the file of every weight"),
        ('{"weight_map": {"a": 1}}', "weight_map is {'a': 1}, expected the file"),
        ('{"weight_map": {"a": "a.safetensors"}}', "1 files that are not there: a.safetensors"),
        (POINTER, "is a Git LFS pointer"),
    ],
)
def test_a_damaged_index_is_refused(
    model: Path, tmp_path: Path, content: str, message: str
) -> None:
    directory = with_file(model, tmp_path / "m", INDEX_FILE, content)
    (directory / WEIGHTS_FILE).unlink()
    assert message in refusal(directory)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "pointer"])
def test_damaged_weights_are_refused(model: Path, tmp_path: Path, name: str, damage: str) -> None:
    directory = tmp_path / "m"
    shutil.copytree(model, directory) if name == WEIGHTS_FILE else pickled(model, directory)
    data = (directory / name).read_bytes()
    content, message = {
        "cut": (data[: len(data) // 2], "is damaged or no ."),
        "empty": (b"", "is empty"),
        "noise": (b"\x80\x04 no weights" * 9, "is damaged or no ."),
        "pointer": (POINTER.encode(), "is a Git LFS pointer, not the file itself; run `git lfs"),
    }[damage]
    (directory / name).write_bytes(content)
    assert f"{name} {message}" in refusal(directory)


def test_a_pickle_that_holds_no_weights_is_refused(model: Path, tmp_path: Path) -> None:
    directory = pickled(model, tmp_path / "m")
    torch.save({"state_dict": weights_of(model)}, directory / "pytorch_model.bin")
    assert "pytorch_model.bin is damaged or no .bin file" in refusal(directory)


def test_weights_under_other_names_are_listed(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    shutil.copytree(model, directory)
    (directory / WEIGHTS_FILE).rename(directory / "model.fp16.safetensors")
    message = refusal(directory)
    assert "no model.safetensors or pytorch_model.bin" in message
    assert "only model.fp16.safetensors" in message


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float8_e4m3fn, {"weight_scale": torch.ones(1)}),
        (torch.float8_e4m3fn, {}),
        (torch.float8_e5m2, {}),
        (torch.int8, {"SCB": torch.ones(32)}),
        (torch.int8, {}),
        (torch.uint8, {}),
    ],
)
def test_quantised_weights_without_a_config_are_refused(
    model: Path, tmp_path: Path, dtype: torch.dtype, scales: Weights
) -> None:
    path = Q.removesuffix("weight")
    extra = {path + name: scale for name, scale in scales.items()}
    directory = with_weights(
        model, tmp_path / "m", lambda weights: weights | {Q: weights[Q].to(dtype)} | extra
    )
    message = refusal(directory)
    assert "has quantised weights that nothing dequantises: " in message
    assert Q in message
