"""The container: what a header says, and every way in which it can be wrong."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from struct import pack
from typing import Any

import gguf
import numpy as np
import pytest
from support.models.quantised import FOLDER, GGUFS

from trt_lora.builder.checkpoint.gguf_file import read_gguf
from trt_lora.plugins.errors import ModelError

F32, U32, STRING, ARRAY = 0, 4, 8, 9


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return pack("<Q", len(data) if length is None else length) + data


def stated(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + pack("<I", kind) + value


def entry(name: str | bytes, dims: Sequence[int] = (4,), offset: int = 0, kind: int = F32) -> bytes:
    return text(name) + pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    *entries: bytes,
    values: Sequence[bytes] = (),
    start: bytes = b"GGUF\x03\0\0\0",
    counts: tuple[int, int] | None = None,
    nbytes: int = 64,
) -> bytes:
    """A file whose tensors have `nbytes` bytes together."""
    own = (len(entries), len(values))
    header = start + pack("<QQ", *(counts or own)) + b"".join(values) + b"".join(entries)
    return header + bytes(-len(header) % 32) + bytes(nbytes)


def read(path: Path, data: bytes) -> Any:
    (path / "m.gguf").write_bytes(data)
    return read_gguf(path / "m.gguf")


VALUES = (
    stated("a", 0, pack("<B", 255)),
    stated("b", 1, pack("<b", -1)),
    stated("c", 2, pack("<H", 65535)),
    stated("d", 3, pack("<h", -2)),
    stated("e", U32, pack("<I", 1 << 31)),
    stated("f", 5, pack("<i", -3)),
    stated("g", 6, pack("<f", 0.5)),
    stated("h", 7, b"\x01"),
    stated("i", STRING, text("\u00e9")),
    stated("j", 10, pack("<Q", 1 << 63)),
    stated("k", 11, pack("<q", -4)),
    stated("l", 12, pack("<d", 0.1)),
    stated("m", ARRAY, pack("<IQ", STRING, 2) + text("x") + text("yy")),
    stated("n", ARRAY, pack("<IQ3h", 3, 3, 1, 2, 3)),
)
EXPECTED = [255, -1, 65535, -2, 1 << 31, -3, 0.5, True, "\u00e9", 1 << 63, -4, 0.1]


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value_is_read(tmp_path: Path, version: int) -> None:
    start = b"GGUF" + pack("<I", version)
    found = read(tmp_path, file_of(entry("w", (2, 3)), values=VALUES, start=start))
    assert [*found.metadata.values()] == [*EXPECTED, "an array of 2", "an array of 3"]
    assert found.tensors["w"].shape == (3, 2)


def test_tensors_lie_behind_the_header_at_multiples_of_the_alignment(tmp_path: Path) -> None:
    wide = [stated("general.alignment", U32, pack("<I", 128))]
    data = file_of(entry("a", (5,), 128), entry("b"), values=wide, nbytes=512)
    found = read(tmp_path, data).tensors
    assert (found["b"].start, found["b"].end) == (128, 144)
    assert (found["a"].start, found["a"].end) == (256, 276)


@pytest.mark.parametrize("name", GGUFS)
def test_a_header_is_read_as_the_library_reads_it(name: str) -> None:
    path = FOLDER / name / "model.gguf"
    library, found = gguf.GGUFReader(path), read_gguf(path)
    assert found.metadata["general.architecture"] == "llama"
    assert {
        tensor.name: (tensor.tensor_type.name, tuple(tensor.shape.tolist()[::-1]))
        for tensor in library.tensors
    } == {name: (tensor.type, tensor.shape) for name, tensor in found.tensors.items()}
    data = path.read_bytes()
    for tensor in library.tensors:
        own = found.tensors[tensor.name]
        assert own.start == tensor.data_offset
        assert data[own.start : own.end] == np.asarray(tensor.data).tobytes()


BIG = 1 << 62


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file_of(entry("w"), start=b"GGML\x03\0\0\0"), "it does not begin with GGUF"),
        (b"GG", "its header is cut off by its end, at byte 2"),
        (file_of(entry("w"), start=b"GGUF\x01\0\0\0"), "its version is 1, and 2 or 3 is read"),
        (file_of(entry("w"), start=b"GGUF\x04\0\0\0"), "its version is 4, and 2 or 3 is read"),
        (file_of(entry("w"), start=b"GGUF\0\0\0\x03"), "little-endian, which this file is not"),
        (file_of(entry("w"), counts=(BIG, 0)), f"it is too small for {BIG} tensors and 0 values"),
        (file_of(entry("w"), counts=(1, BIG)), f"it is too small for 1 tensors and {BIG} values"),
        (file_of(entry("w"))[:40], "is cut off by its end, at byte 40"),
        (file_of(values=[text("k", BIG)]), "its header is cut off by its end, at byte 128"),
        (file_of(values=[stated("k", STRING, text("v", 200))]), "its header is cut off by its end"),
        (file_of(values=[stated("k", 13, b"")]), "type 13 of a value is not known"),
        (file_of(values=[stated("k", ARRAY, pack("<IQ", U32, BIG))]), "is cut off by its end"),
        (file_of(values=[stated("k", ARRAY, pack("<IQ", STRING, BIG))]), "is cut off by its end"),
        (
            file_of(values=[stated("k", ARRAY, pack("<IQ", ARRAY, 1))]),
            "type 9 of an array's values is not read",
        ),
        (file_of(values=[stated(b"\xff", U32, bytes(4))]), r"b'\xff' is not UTF-8"),
        (file_of(values=[stated("k", STRING, text(b"\xff"))]), r"b'\xff' is not UTF-8"),
        (file_of(values=[stated("k", U32, bytes(4))] * 2), "'k' is there twice"),
        (file_of(entry(b"w\xfe")), r"b'w\xfe' is not UTF-8"),
        (file_of(entry("w\n"), entry("w\n", offset=32)), r"'w\n' is there twice"),
        (file_of(entry("w", ())), "'w' has 0 dimensions"),
        (file_of(entry("w", (1,) * 5)), "'w' has 5 dimensions"),
        (file_of(entry("w", (4, 0))), "'w' [0, 4] is not whole blocks of F32"),
        (file_of(entry("w", (48, 4), kind=2)), "'w' [4, 48] is not whole blocks of Q4_0"),
        (file_of(entry("w", (128, 4), kind=14)), "'w' [4, 128] is not whole blocks of Q6_K"),
        (file_of(entry("w", (17,))), "'w' is cut off by its end, at 128"),
        (file_of(entry("w", (BIG, BIG, BIG))), "'w' is cut off by its end"),
        (file_of(entry("w", offset=64)), "'w' is cut off by its end"),
        (file_of(entry("w", offset=(1 << 64) - 32)), "'w' is cut off by its end"),
        (file_of(entry("w", offset=4)), "'w' does not start at a multiple of 32"),
        (file_of(entry("v"), entry("w")), "'v' and 'w' overlap"),
        (file_of(entry("v", (9,)), entry("w", offset=32)), "'v' and 'w' overlap"),
        *(
            (file_of(entry("w"), values=[stated("general.alignment", *value)]), message)
            for value, message in (
                ((U32, pack("<I", 0)), "general.alignment is 0, and no power of 2"),
                ((U32, pack("<I", 48)), "general.alignment is 48, and no power of 2"),
                ((STRING, text("x")), "general.alignment is 'x', and no power of 2"),
                ((10, pack("<Q", BIG)), "'w' is cut off by its end"),
            )
        ),
    ],
)
def test_what_is_damaged_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, data)
    said = str(raised.value)
    assert message in said
    assert said.startswith(f"{tmp_path / 'm.gguf'} is damaged or no GGUF file: ")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("kind", "name"),
    [(3, "Q4_1"), (6, "Q5_0"), (12, "Q4_K"), (24, "I8"), (39, "MXFP4"), (99, "99")],
)
def test_another_type_is_refused_with_what_is_read_and_what_to_do(
    tmp_path: Path, kind: int, name: str
) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, file_of(entry("w", (256, 4), kind=kind)))
    assert str(raised.value) == (
        f"{tmp_path / 'm.gguf'}: 'w' is of type {name}, and Q4_0, Q8_0, Q6_K, F16, BF16, F32 are "
        "read; quantise the model anew with llama-quantize to Q4_0 or Q8_0, or pass its safetensors"
    )


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if kind < 41])
def test_the_names_and_sizes_of_types_are_the_library_s(tmp_path: Path, kind: Any) -> None:
    data = file_of(entry("w", (256,), kind=int(kind)), nbytes=2048)
    if kind.name in ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q6_K"):
        tensor = read(tmp_path, data).tensors["w"]
        values, nbytes = gguf.GGML_QUANT_SIZES[kind]
        assert (tensor.type, tensor.end - tensor.start) == (kind.name, 256 // values * nbytes)
        return
    with pytest.raises(ModelError, match=f"is of type {kind.name}, and Q4_0"):
        read(tmp_path, data)


@pytest.mark.parametrize("name", GGUFS)
def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    data = (FOLDER / name / "model.gguf").read_bytes()
    end = max(tensor.end for tensor in read(tmp_path, data).tensors.values())
    for size in [*range(1, 1500, 7), *range(1500, end, 9973), end - 1]:
        with pytest.raises(ModelError, match="is damaged or no GGUF file: "):
            read(tmp_path, data[:size])


@pytest.mark.parametrize("name", GGUFS)
def test_bytes_that_were_changed_are_read_or_refused(tmp_path: Path, name: str) -> None:
    data = (FOLDER / name / "model.gguf").read_bytes()
    end = min(tensor.start for tensor in read(tmp_path, data).tensors.values())
    generator = np.random.default_rng(0)
    for place, byte in zip(generator.integers(0, end, 500), generator.bytes(500), strict=True):
        changed = bytearray(data)
        changed[place] = byte
        with contextlib.suppress(ModelError):
            tensors = read(tmp_path, bytes(changed)).tensors.values()
            assert all(tensor.end <= len(data) for tensor in tensors)


def test_an_empty_file_and_a_pointer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is empty"):
        read(tmp_path, b"")
    with pytest.raises(ModelError, match="is a Git LFS pointer"):
        read(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid")
