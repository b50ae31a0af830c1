"""Files that somebody made to break the loader: refused by name, soon, in little memory."""

import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from hostile.limits import assert_kept, assert_refused, entry, with_header
from hostile.targets import (
    CONFIG,
    TARGETS,
    encoded,
    full_config,
    manifest_fields,
    npy_bytes,
    peft_weights,
    seeds,
    trtllm_arrays,
    write,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.adapters.manager_setup import SITE, manager_with, pair

from trt_lora.plugins.errors import AdapterError, ManifestError
from trt_lora.runtime.adapters.formats.trtllm import TRTLLM_CONFIG, TRTLLM_WEIGHTS
from trt_lora.runtime.manifest import read_manifest

STABLE = settings(
    max_examples=60,
    deadline=None,  # `within` sets one
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example writes all files
)


@st.composite
def mutations(draw: st.DrawFn, kind: str) -> bytes:
    """A valid file with bytes set, four bytes set, cut, or put in."""
    data = bytearray(draw(st.sampled_from(seeds(kind))))
    words = st.sampled_from([0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]) | st.integers(0, 400)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["byte", "word", "cut", "insert"]))
        if change == "byte":
            data[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif change == "word":
            data[place & ~3 : (place & ~3) + 4] = struct.pack("<I", draw(words))
        elif change == "cut":
            del data[place : place + draw(st.integers(1, 400))]
        else:
            data[place:place] = draw(st.binary(max_size=8))
    return bytes(data)


@pytest.mark.parametrize("kind", TARGETS)
def test_valid_files_are_accepted_within_the_memory(tmp_path: Path, kind: str) -> None:
    for number, data in enumerate(seeds(kind)):
        assert_kept(kind, tmp_path / str(number), data)


@pytest.mark.parametrize("kind", TARGETS)
@given(data=st.data())
@STABLE
def test_mutated_bytes_keep_the_promise(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    assert_kept(kind, tmp_path, data.draw(mutations(kind)))


@pytest.mark.parametrize("kind", TARGETS)
@given(data=st.binary(max_size=200))
@STABLE
def test_any_bytes_keep_the_promise(tmp_path: Path, kind: str, data: bytes) -> None:
    assert_kept(kind, tmp_path, data)


@pytest.mark.parametrize("kind", TARGETS)
def test_files_cut_at_any_byte_keep_the_promise(tmp_path: Path, kind: str) -> None:
    whole = seeds(kind)[-1]
    for size in range(0, len(whole), max(1, len(whole) // 100)):
        TARGETS[kind](tmp_path, whole[:size])


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, 10**400, float("nan")]),
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def header_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + size]), file[8 + size :]


SIZES = st.integers(0, 9) | st.sampled_from([2**31, 2**40, 2**50, 2**62, 2**63, 2**64 - 1, -1])


@given(
    seed=st.sampled_from(seeds("safetensors")),
    part=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=JSON | st.lists(SIZES, max_size=4),
    number=st.integers(0, 1),
)
@STABLE
def test_a_tensor_s_entry_may_hold_anything(
    tmp_path: Path, seed: bytes, part: str, value: object, number: int
) -> None:
    header, data = header_of(seed)
    name = [name for name in header if name != "__metadata__"][number]
    header[name][part] = value
    assert_kept("safetensors", tmp_path, with_header(header, data))


@given(name=st.text(max_size=30) | st.sampled_from([SITE, "__metadata__"]), value=JSON)
@example(name="__metadata__", value=None)
@STABLE
def test_a_header_may_hold_anything_under_any_name(
    tmp_path: Path, name: str, value: object
) -> None:
    header, data = header_of(peft_weights())
    assert_kept("safetensors", tmp_path, with_header(header | {name: value}, data))


@given(shape=st.lists(SIZES, max_size=3), name=st.sampled_from([*pair(), "lora_A_q"]))
@example(shape=[0, 2**50], name="lora_A_q")
@example(shape=[0, 2**62], name="lora_A_q")
@example(shape=[2**63, 0], name="lora_A_q")
@STABLE
def test_an_empty_tensor_of_any_shape_keeps_the_promise(
    tmp_path: Path, shape: list[int], name: str
) -> None:
    assert_kept("safetensors", tmp_path, with_header({name: entry(shape, 0, 0)}))


@pytest.mark.parametrize(
    "offsets",
    [((0, 16), (8, 24)), ((0, 16), (0, 16)), ((0, 16), (32, 48)), ((16, 0), (16, 32))],
    ids=["overlapping", "the same", "with a hole", "backwards"],
)
def test_offsets_that_overlap_or_leave_holes_are_refused(
    tmp_path: Path, offsets: tuple[tuple[int, int], ...]
) -> None:
    names = zip(("lora_A_q", "lora_B_q"), offsets, strict=True)
    data = with_header({name: entry([2, 2], *place) for name, place in names}, b"\0" * 48)
    path = write(tmp_path, {"a.safetensors": data}) / "a.safetensors"
    assert_refused(path, "not a valid safetensors file")


@given(field=st.sampled_from([*full_config(), "unheard_of", "use_dora", "peft_type"]), value=JSON)
@STABLE
def test_a_field_of_a_config_may_hold_anything(tmp_path: Path, field: str, value: object) -> None:
    assert_kept("peft", tmp_path, encoded(full_config() | {field: value}))


@given(
    field=st.sampled_from(["rank_pattern", "alpha_pattern"]),
    pattern=st.text(alphabet="aqv.*+?{}()[]|^$\\<>=!:#-,1dwP ", max_size=12),
    value=SCALARS,
)
@STABLE
def test_a_rank_or_alpha_pattern_may_be_anything(
    tmp_path: Path, field: str, pattern: str, value: object
) -> None:
    assert_kept("peft", tmp_path, encoded(CONFIG | {field: {pattern: value}}))


@given(
    field=st.sampled_from(["target_modules", "exclude_modules", "layers_pattern"]),
    pattern=st.text(alphabet="aqv.*+?{}()[]|^$\\<>=!:#-,1dwP ", max_size=12),
)
@example(field="target_modules", pattern="a)(b")
@example(field="target_modules", pattern="[[")
@example(field="layers_pattern", pattern="|")
@example(field="layers_pattern", pattern="a)(b")
@example(field="layers_pattern", pattern="(?P<layer>a)")
@STABLE
def test_a_pattern_of_targets_may_be_anything(tmp_path: Path, field: str, pattern: str) -> None:
    assert_kept("peft", tmp_path, encoded(full_config() | {field: pattern}))


@given(value=JSON | st.dictionaries(st.text(max_size=8), JSON, max_size=3))
@example(value={"a": "x" * 300})
@STABLE
def test_the_map_of_an_index_may_be_anything(tmp_path: Path, value: object) -> None:
    assert_kept("peft", tmp_path, encoded({"weight_map": value}))


@pytest.mark.parametrize("kind", ["peft", "manifest"])
@pytest.mark.parametrize("depth", [900, 970, 980, 985, 990, 995, 1000, 100_000])
@pytest.mark.parametrize("brackets", [b"[]", b'{"":0}'])
def test_deeply_nested_json_keeps_the_promise(
    tmp_path: Path, kind: str, depth: int, brackets: bytes
) -> None:
    opened, closed = (b"[", b"]") if brackets == b"[]" else (b'{"":', b"}")
    nested = opened * depth + b"0" + closed * depth
    for name in (b"peft_type", b"schema_version", b"weight_map", b"r"):
        TARGETS[kind](tmp_path, b'{"peft_type":"LORA","%s":%s}' % (name, nested))


def paths_of(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a JSON value, of lists the first item."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, item in [*items, *(enumerate(value[:1]) if isinstance(value, list) else ())]:
        yield from paths_of(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@given(path=st.sampled_from(list(paths_of(manifest_fields()))[1:]), value=JSON)
@example(path=("files", "engine.plan"), value={"size_bytes": None, "sha256": "0"})
@STABLE
def test_a_part_of_a_manifest_may_be_anything(
    tmp_path: Path, path: tuple[Any, ...], value: object
) -> None:
    assert_kept("manifest", tmp_path, encoded(replaced(manifest_fields(), path, value)))


@pytest.mark.parametrize("name", ["x" * 300, "\ud800", "\0", "..", "/etc/passwd", "a/b", "."])
@pytest.mark.parametrize("size", [1, None])
def test_a_manifest_s_file_name_may_be_anything(
    tmp_path: Path, name: str, size: int | None
) -> None:
    fields = manifest_fields()
    fields["files"][name] = {"size_bytes": size, "sha256": ""}
    TARGETS["manifest"](tmp_path, encoded(fields))
    with pytest.raises(ManifestError):
        read_manifest(tmp_path)


def npy_of(header: str, size: int | None = None) -> bytes:
    text = header.encode("latin1", "replace")
    length = struct.pack("<H", len(text) if size is None else size)
    return b"\x93NUMPY\1\0" + length + text + b"\0" * 112


def npy_header(descr: str = "'<f4'", shape: str = "(1, 1, 28)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


LITERALS = st.recursive(
    SCALARS | st.binary(max_size=4) | st.sampled_from(["<f4", "|V2", "|O", "f4,f4", "a", "m8[s]"]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(descr=LITERALS, shape=LITERALS | st.lists(SIZES, max_size=4).map(tuple))
@example(descr=(), shape=(1, 1, 28))
@example(descr="a", shape=(1, 1, 28))
@example(descr="<f4", shape=(1, 2**63, 0))
@STABLE
def test_an_npy_header_may_hold_anything(tmp_path: Path, descr: object, shape: object) -> None:
    assert_kept("npy", tmp_path, npy_of(npy_header(repr(descr), repr(shape))))


HEADERS = {
    "a hexadecimal size without end": npy_header(shape=f"(0x{'f' * 8000},)"),
    "a decimal size without end": npy_header(shape=f"({'9' * 4000}, 9)"),
    "Python 2's integers": npy_header(shape="(1L, 1L, 28L)"),
    "brackets": npy_header(shape="(" * 400 + ")" * 400),
    "signs": npy_header(shape="-" * 5000 + "1"),
    "an escape": npy_header(descr=r"'\d'"),
    "an unknown character": npy_header(descr=r"'\N{X}'"),
    "no literal": npy_header(descr="print(1)"),
    "a suffix": "1if 1else 2",
    "an expression": "9" * 2000 + "**9",
    "column order": npy_header(order="True"),
    "nothing": "",
    "other keys": "{[]: 1}",
    "a zero": "\0",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_an_npy_header_of_another_kind_keeps_the_promise(tmp_path: Path, header: str) -> None:
    assert_kept("npy", tmp_path, npy_of(header))


@pytest.mark.parametrize("descr", ["[('x', '<i2')]", "[('x', '|u1', (2,))]", "('|u1', (2,))"])
def test_a_record_of_two_bytes_is_not_taken_for_bfloat16(tmp_path: Path, descr: str) -> None:
    _, config = (npy_bytes(array) for array in trtllm_arrays())
    write(tmp_path, {TRTLLM_WEIGHTS: npy_of(npy_header(descr))[:-56], TRTLLM_CONFIG: config})
    with pytest.raises(AdapterError, match=r"holds '\|V2'|is no \.npy file"):
        manager_with().load_weights("hostile", tmp_path)


@pytest.mark.parametrize("version", [(0, 0), (3, 0), (4, 0), (9, 9), (1, 1)])
def test_an_npy_version_that_does_not_exist_is_refused(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    weights, config = (bytearray(npy_bytes(array)) for array in trtllm_arrays())
    weights[6:8] = bytes(version)
    write(tmp_path, {TRTLLM_WEIGHTS: bytes(weights), TRTLLM_CONFIG: bytes(config)})
    assert_refused(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 60, 65535])
def test_an_npy_header_length_that_lies_keeps_the_promise(tmp_path: Path, size: int) -> None:
    assert_kept("npy", tmp_path, npy_of(npy_header(), size=size))


class Bomb:
    """An object whose pickle, once loaded, makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [TRTLLM_WEIGHTS, TRTLLM_CONFIG])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str) -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([[[Bomb(tmp_path / "loaded")]]], object), allow_pickle=True)
    weights, config = (npy_bytes(array) for array in trtllm_arrays())
    write(tmp_path, {TRTLLM_WEIGHTS: weights, TRTLLM_CONFIG: config, name: stream.getvalue()})
    with pytest.raises(AdapterError, match=r"holds '\|O'"):
        manager_with().load_weights("hostile", tmp_path)
    assert not (tmp_path / "loaded").exists()


def onnx_adapter_of(names: list[str], raw: bytes, dims: list[int]) -> bytes:
    """Every name with the same elements: FlatBuffers allows what safetensors forbids."""
    builder = flatbuffers.Builder(0)
    builder.StartVector(1, len(raw), 8)
    builder.head = builder.Head() - len(raw)
    builder.Bytes[builder.Head() : builder.Head() + len(raw)] = raw
    elements = builder.EndVector()
    builder.StartVector(8, len(dims), 8)
    for size in reversed(dims):
        builder.PrependInt64(size)
    shape = builder.EndVector()
    parameters = [_parameter(builder, name, shape, elements) for name in names]
    builder.StartVector(4, len(parameters), 4)
    for parameter in reversed(parameters):
        builder.PrependUOffsetTRelative(parameter)
    vector = builder.EndVector()
    builder.StartObject(4)
    for slot in range(3):
        builder.PrependInt32Slot(slot, 1, 0)  # the versions
    builder.PrependUOffsetTRelativeSlot(3, vector, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TORT")
    return bytes(builder.Output())


def _parameter(builder: Any, name: str, shape: int, elements: int) -> int:
    text = builder.CreateString(name)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(0, text, 0)
    builder.PrependUOffsetTRelativeSlot(1, shape, 0)
    builder.PrependInt32Slot(2, 1, 0)  # float32
    builder.PrependUOffsetTRelativeSlot(3, elements, 0)
    return int(builder.EndObject())


def test_parameters_that_share_their_elements_do_not_multiply_them(tmp_path: Path) -> None:
    names = [f"lora_A_{number}" for number in range(64)]
    data = onnx_adapter_of(names, b"\0" * (1 << 20), [1 << 9, 1 << 9])
    assert_kept("onnx_adapter", tmp_path, data)


@pytest.mark.parametrize("dims", [[0, 1 << 50], [1 << 50, 0], [], [1], [1, 1, 2], [-1, -2]])
def test_a_parameter_of_any_shape_keeps_the_promise(tmp_path: Path, dims: list[int]) -> None:
    size = max(0, int(np.prod(dims, dtype=object))) * 4
    assert_kept("onnx_adapter", tmp_path, onnx_adapter_of(["lora_A_q"], b"\0" * size, dims))
