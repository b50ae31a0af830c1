"""Hostile files cannot take more time or memory than their size allows."""

from pathlib import Path

import numpy as np
import pytest
from hostile.limits import (
    SECONDS,
    TRACED,
    assert_kept,
    assert_memory,
    entry,
    loaded,
    sharded,
    with_header,
    within,
)
from hostile.targets import CONFIG, SHARD, TARGETS, encoded, load, named, npy_bytes, write
from safetensors.numpy import save
from support.adapters.manager_setup import manager_with

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.adapters.formats.trtllm import TRTLLM_CONFIG, TRTLLM_WEIGHTS
from trt_lora.runtime.adapters.load import load_adapter

JSON_GROWTH = 28  # times: what Python's objects take of the text that they are read from


ATTACKS = [
    "(a+)+$",
    "(a|aa)+$",
    "(.*)*x",
    "(.*.*)*x",
    "(?x:(a+) +)b",
    "(?x:(a+)#\n+)b",
    "(a+)(?#)+b",
    "(?:a+){9}b",
    "((a*)*)*b",
    ".*.*.*.*x",
    "(?=(a+))\\1*b",
    "(?P<x>a+)(?P=x)*b",
    "a{65535}{65535}",
    ".*.*(" + "|".join(["aa"] * 330) + ")x",
    ".*.*.?.?.?.?x",
]


@pytest.mark.parametrize("pattern", ATTACKS)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_a_pattern_cannot_stop_the_loader(tmp_path: Path, field: str, pattern: str) -> None:
    value = pattern if field == "target_modules" else {pattern: 2}
    for path in ("a" * 10_000, "a" * 200, "." * 10_000, "." * 200, "a." * 100):
        names = [f"base_model.model.{path}.lora_{factor}.weight" for factor in "AB"]
        files = {
            CONFIG_FILE: encoded(CONFIG | {field: value}),
            WEIGHTS_FILE: save({name: np.ones((2, 2), np.float32) for name in names}),
        }
        with within(SECONDS):
            loaded(write(tmp_path, files))


def peft_of(directory: Path, config: bytes, tensors: int = 1) -> Path:
    names = [f"base_model.model.model.layers.{i}.mlp.lora_A.weight" for i in range(tensors)]
    weights = save({name: np.ones((2, 2), np.float32) for name in names})
    return write(directory, {CONFIG_FILE: config, WEIGHTS_FILE: weights})


@pytest.mark.parametrize("pattern", ["layers.%d.x", ".*.*x%d", "%d"])
def test_many_patterns_and_many_tensors_do_not_multiply(tmp_path: Path, pattern: str) -> None:
    patterns = {pattern % number: 2 for number in range(2000)}
    path = peft_of(tmp_path, encoded(CONFIG | {"rank_pattern": patterns}), tensors=420)
    with within(SECONDS):
        loaded(path)


def test_a_rank_for_each_of_many_modules_is_read_in_time(tmp_path: Path) -> None:
    ranks = {f"model.layers.{number}.mlp": 2 for number in range(1500)}
    path = peft_of(tmp_path, encoded(CONFIG | {"rank_pattern": ranks}), tensors=1500)
    with within(SECONDS):
        assert len(load_adapter(path).weights) == 1500


@pytest.mark.parametrize("count", [10_000, 1_000_000])
def test_a_name_of_many_parts_is_matched_in_time(tmp_path: Path, count: int) -> None:
    weights = {f"lora_{f}_{'.' * count}": np.ones((1, 1), np.float32) for f in "AB"}
    path = write(tmp_path, {"a.safetensors": save(weights)}) / "a.safetensors"
    with within(SECONDS), pytest.raises(AdapterError):
        manager_with().load_weights("hostile", path)


def test_many_empty_tensors_take_little_time_and_memory(tmp_path: Path) -> None:
    data = with_header({f"lora_A_{number}": entry([0, 0], 0, 0) for number in range(100_000)})
    path = write(tmp_path, {"a.safetensors": data}) / "a.safetensors"
    with within(TRACED * SECONDS):
        assert_memory(lambda: loaded(path), len(data))


LARGE = 1_300_000
JSON_BOMBS = {
    "lists": b'{"peft_type":"LORA","schema_version":1,"loftq_config":[' + b"[]," * LARGE + b"0]}",
    "objects": b'{"peft_type":"LORA","schema_version":1,"x":[' + b"{}," * LARGE + b"0]}",
    "texts": b'{"peft_type":[' + b'"",' * LARGE + b"0]}",
    "wide text": b'{"schema_version":1,"x":"' + b"x" * LARGE + "\U0001f600".encode() + b'"}',
    "no text": b'{"schema_version":1,"x":"' + b"\xff" * LARGE,
}


@pytest.mark.parametrize("data", JSON_BOMBS.values(), ids=JSON_BOMBS)
def test_the_json_of_an_adapter_cannot_take_much_more_memory_than_its_file(
    tmp_path: Path, data: bytes
) -> None:
    assert_kept("peft", tmp_path, data)


@pytest.mark.parametrize("data", JSON_BOMBS.values(), ids=JSON_BOMBS)
def test_a_manifest_takes_no_more_than_python_s_objects_for_its_text(
    tmp_path: Path, data: bytes
) -> None:
    with within(TRACED * SECONDS):
        assert_memory(lambda: TARGETS["manifest"](tmp_path, data), JSON_GROWTH // 2 * len(data))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("last", [b"\0\0", b"\xff\x7f"], ids=["finite", "NaN"])
def test_values_cannot_take_much_more_memory_than_their_file(
    tmp_path: Path, dtype: str, last: bytes
) -> None:
    size = 4 << 20
    width = size // (4 if dtype == "F32" else 2) // 1024
    data = with_header(
        {"lora_A_q": entry([1024, width], 0, size, dtype=dtype)}, b"\0" * (size - 2) + last
    )
    path = write(tmp_path, {"a.safetensors": data}) / "a.safetensors"

    manager = manager_with(bound=False)
    assert_memory(lambda: named(path, lambda: manager.load_weights("a", path)), len(data))


def test_many_rows_for_one_site_are_refused_in_time_and_memory(tmp_path: Path) -> None:
    rows = 200_000
    weights, config = npy_bytes(np.ones((rows, 0), np.float32)), np.tile([1, 0, 2, 0], (rows, 1))
    files = {TRTLLM_WEIGHTS: weights, TRTLLM_CONFIG: npy_bytes(config.astype(np.int32))}
    write(tmp_path, files)
    with within(SECONDS):
        assert_memory(lambda: load(tmp_path), sum(map(len, files.values())))


def test_an_index_of_many_names_for_one_empty_shard_is_refused_in_time(tmp_path: Path) -> None:
    names = [f"{'./' * number}{SHARD}" for number in range(2000)]
    write(sharded(tmp_path, *names), {SHARD: with_header({})})
    with within(SECONDS), pytest.raises(AdapterError):
        load_adapter(tmp_path)
