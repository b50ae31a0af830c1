"""Adapters from disk: each format recognised, damaged files refused, the result immutable."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file
from support.fakes.fake_engine import write_peft
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import Weight, weight_of
from trt_lora.runtime.files.safetensors_file import read_safetensors
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

WEIGHTS = {
    "lora_A_q": np.arange(8, dtype=np.float32).reshape(4, 2),
    "lora_B_q": np.arange(6, dtype=np.float32).reshape(2, 3),
}


def file_of(directory: Path, data: bytes) -> Path:
    path = directory / "adapter.safetensors"
    path.write_bytes(data)
    return path


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def assert_refused(path: Path, *messages: str) -> None:
    """Refused with the path and every one of the messages."""
    with refused(AdapterError, path, *messages):
        load_adapter(path).in_memory()


# ---------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("kind", [Path, str])
def test_a_directory_is_read_as_peft(tmp_path: Path, kind: Callable[[Path], str | Path]) -> None:
    factors = {"q.lora_A": WEIGHTS["lora_B_q"], "q.lora_B": WEIGHTS["lora_A_q"]}
    adapter = load_adapter(kind(write_peft(tmp_path, factors)))
    assert adapter.weights.keys() == {"lora_A_q", "lora_B_q"}


@pytest.mark.parametrize("kind", [Path, str])
def test_a_file_keeps_names_shapes_and_values(
    tmp_path: Path, kind: Callable[[Path], str | Path]
) -> None:
    save_file(WEIGHTS, tmp_path / "adapter.safetensors", metadata={"format": "pt"})
    adapter = load_adapter(kind(tmp_path / "adapter.safetensors"))
    assert adapter.weights.keys() == WEIGHTS.keys()
    for name, values in WEIGHTS.items():
        np.testing.assert_array_equal(adapter.weights[name].values(), values)
    assert adapter.source == str(tmp_path / "adapter.safetensors")
    assert adapter.owned


def test_a_file_may_be_replaced_or_removed_once_it_is_opened(tmp_path: Path) -> None:
    path = file_of(tmp_path, save(WEIGHTS))
    adapter = load_adapter(path)
    (tmp_path / "new").write_bytes(b"\xff" * path.stat().st_size)
    (tmp_path / "new").rename(path)
    path.unlink()
    for name, values in WEIGHTS.items():
        np.testing.assert_array_equal(adapter.weights[name].values(), values)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, save(WEIGHTS))
    adapter = load_adapter(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(AdapterError, match="changed while it was read"):
        adapter.in_memory()


def test_an_adapter_in_memory_outlives_its_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, save(WEIGHTS))
    adapter = load_adapter(path).in_memory()
    path.write_bytes(b"\xff" * path.stat().st_size)
    for name, values in WEIGHTS.items():
        np.testing.assert_array_equal(adapter.weights[name].values(), values)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.safetensors"])
def test_a_missing_path_is_refused(tmp_path: Path, name: str) -> None:
    assert_refused(tmp_path / name, "No such file" if "." in name else "does not exist")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.bin"
    path.write_bytes(b"")
    assert_refused(path, "is not an adapter", "convert-adapter", ".onnx_adapter file")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, "has no adapter_config.json")


def test_a_directory_called_like_a_file_is_no_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not a regular file"):
        read_safetensors(tmp_path)


# ------------------------------------------------------------------------- two in one, and no file

PEFT_FILE = "adapter_model.safetensors"
OTHERS = (
    "adapter_model.safetensors.index.json",
    "processed_adapter_model.safetensors",
    "model.lora_weights.npy",
)


def peft_directory(path: Path) -> Path:
    return write_peft(path, {"q.lora_A": WEIGHTS["lora_B_q"], "q.lora_B": WEIGHTS["lora_A_q"]})


@pytest.mark.parametrize("other", OTHERS)
def test_two_adapters_in_one_directory_are_refused_with_both(tmp_path: Path, other: str) -> None:
    directory = peft_directory(tmp_path / "a")
    (directory / other).write_bytes(b"")
    assert_refused(directory, PEFT_FILE, other, "move all but one")


def test_two_adapters_without_peft_s_are_refused_too(tmp_path: Path) -> None:
    for other in OTHERS[1:]:
        (tmp_path / other).write_bytes(b"")
    assert_refused(tmp_path, *OTHERS[1:])


def test_a_bin_beside_the_safetensors_is_not_looked_at_as_in_peft(tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "a")
    (directory / "adapter_model.bin").write_bytes(b"not a pickle")
    assert load_adapter(directory).weights.keys() == {"lora_A_q", "lora_B_q"}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("name", [PEFT_FILE, "adapter_config.json"])
def test_a_pointer_of_git_lfs_is_refused_with_what_fetches_the_file(
    tmp_path: Path, name: str
) -> None:
    directory = peft_directory(tmp_path / "a")
    (directory / name).write_bytes(POINTER)
    assert_refused(directory, name, "pointer of Git LFS", "git lfs pull")
    assert_refused(file_of(tmp_path, POINTER), "git lfs pull")


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".onnx_adapter"])
@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "\ud800", "\udcff/a"])
def test_a_path_that_no_file_can_have_is_refused_on_one_line(name: str, suffix: str) -> None:
    with pytest.raises(AdapterError) as caught:
        load_adapter(name + suffix)
    message = str(caught.value)
    assert "\n" not in message
    message.encode()  # any stream takes it


def test_a_directory_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)  # the tests may run as root
    assert_refused(peft_directory(tmp_path / "a"), "cannot be opened: Permission denied")


# ----------------------------------------------------------------------------------- damaged files


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = save(WEIGHTS)
    for size in range(len(whole)):
        assert_refused(file_of(tmp_path, whole[:size]), "not a valid safetensors file")


def test_a_byte_too_many_is_refused(tmp_path: Path) -> None:
    assert_refused(file_of(tmp_path, save(WEIGHTS) + b"\0"), "not a valid safetensors file")


def entry(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"lora_A_q": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(with_header(entry("F32", [4, 2], 0, 32), b"\0" * 8), id="beyond the file"),
        pytest.param(with_header(entry("F32", [1 << 40, 2], 0, 1 << 43), b"\0" * 8), id="huge"),
        pytest.param(with_header(entry("F32", [4, 2], 0, 16), b"\0" * 16), id="shape"),
        pytest.param(with_header(entry("F32", [4, 2], -32, 0), b"\0" * 32), id="negative"),
        pytest.param(with_header(entry("F32", [4, 2], 8, 40), b"\0" * 40), id="hole"),
        pytest.param(with_header(entry("F31", [4, 2], 0, 32), b"\0" * 32), id="dtype"),
        pytest.param(with_header([1, 2]), id="no object"),
        pytest.param(with_header({"lora_A_q": 1}), id="no entry"),
        pytest.param(struct.pack("<Q", 1 << 63) + b"{}", id="header beyond the file"),
        pytest.param(struct.pack("<Q", 2) + b"\xff\xff", id="no text"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, data: bytes) -> None:
    assert_refused(
        file_of(tmp_path, data), "not a valid safetensors file", "save the adapter again"
    )


def test_two_tensors_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    twice = {n: e for n in ("lora_A_q", "lora_A_k") for e in entry("F32", [4, 2], 0, 32).values()}
    assert_refused(file_of(tmp_path, with_header(twice, b"\0" * 32)), "not a valid safetensors")


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.int64, "I64"), (np.float64, "F64"), (bool, "BOOL")]
)
def test_a_dtype_that_lora_weights_do_not_have_is_refused(
    tmp_path: Path, dtype: type, name: str
) -> None:
    path = file_of(tmp_path, save({"lora_A_q": np.ones((4, 2), dtype)}))
    assert_refused(path, f"'lora_A_q' is {name}; LoRA weights are one of F32, F16, BF16")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert_refused(file_of(tmp_path, with_header({})), "holds no tensors")
    assert_refused(file_of(tmp_path, with_header({"__metadata__": {"a": "b"}})), "holds no tensors")


# ----------------------------------------------------------------------------------------- adapter


def weights_of(arrays: dict[str, Array]) -> dict[str, Weight]:
    return {name: weight_of(name, tensor_from_numpy(array)) for name, array in arrays.items()}


def adapter_of(weights: dict[str, Array], source: str = "memory") -> Adapter:
    return Adapter(source, weights_of(weights))


def test_an_adapter_is_immutable() -> None:
    weights = weights_of(WEIGHTS)
    adapter = Adapter("memory", weights)
    weights.clear()
    assert adapter.weights.keys() == WEIGHTS.keys()
    with pytest.raises(TypeError):
        adapter.weights["x"] = adapter.weights["lora_A_q"]  # type: ignore[index]  # pyright: ignore[reportIndexIssue]


def test_the_rank_of_every_site_is_read_from_a() -> None:
    edgellm = {"v.lora_A.weight": np.ones((4, 5), np.float32), "other": np.ones(3, np.float32)}
    assert adapter_of({**WEIGHTS, **edgellm}).ranks == {"q": 2, "v": 5}


def test_equal_weights_have_equal_hashes_wherever_they_are_from(tmp_path: Path) -> None:
    loaded = load_adapter(file_of(tmp_path, save(WEIGHTS)))
    turned = adapter_of(dict(reversed(WEIGHTS.items())), "elsewhere")
    assert loaded.content_hash == turned.content_hash == adapter_of(WEIGHTS).content_hash


@pytest.mark.parametrize(
    "change",
    [
        {"lora_A_q": WEIGHTS["lora_A_q"] + 1},
        {"lora_A_q": WEIGHTS["lora_A_q"].reshape(2, 4)},
        {"lora_A_q": WEIGHTS["lora_A_q"].view(np.int32)},
        {"lora_A_k": WEIGHTS["lora_A_q"]},
    ],
)
def test_other_weights_have_another_hash(change: dict[str, Array]) -> None:
    assert adapter_of({**WEIGHTS, **change}).content_hash != adapter_of(WEIGHTS).content_hash
