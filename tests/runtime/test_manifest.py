"""`manifest.json`: read back as it was written, and refused when it is not this engine's."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.fakes.fake_engine import make_manifest
from support.refusals import refused

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import ManifestError
from trt_lora.runtime.files.file_record import FileRecord, file_record
from trt_lora.runtime.manifest import Manifest, read_manifest

PLAN = b"not really a plan"


def write_engine(directory: Path, **changes: Any) -> Manifest:
    """An engine directory with one file; `changes` are made to the JSON, None removes a field."""
    (directory / "engine.plan").write_bytes(PLAN)
    files = {"engine.plan": file_record(directory / "engine.plan")}
    manifest = dataclasses.replace(make_manifest(), files=files)
    fields = {**json.loads(manifest.to_json()), **changes}
    kept = {name: value for name, value in fields.items() if value is not None}
    (directory / "manifest.json").write_text(json.dumps(kept), encoding="utf-8")
    return manifest


def assert_refused(directory: Path, *messages: str) -> None:
    """Refused with the directory and every one of the messages."""
    with refused(ManifestError, directory, *messages):
        read_manifest(directory)


@pytest.mark.parametrize("names", BindingNames)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_manifest_is_read_back_as_it_was_written(
    tmp_path: Path, names: BindingNames, dtype: str
) -> None:
    manifest = make_manifest(names=names, dtype=dtype)
    (tmp_path / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    assert read_manifest(tmp_path) == manifest


def test_a_manifest_with_files_is_read_back_too(tmp_path: Path) -> None:
    manifest = write_engine(tmp_path)
    found = read_manifest(tmp_path)
    assert found == manifest
    assert found.files == {"engine.plan": FileRecord(len(PLAN), hashlib.sha256(PLAN).hexdigest())}


def test_the_text_is_readable_and_ends_with_a_line(tmp_path: Path) -> None:
    text = make_manifest().to_json()
    assert text.endswith("}\n")
    assert '\n "max_lora_rank": 16' in text


@pytest.mark.parametrize("names", BindingNames)
def test_the_lora_bindings_are_a_and_b_of_every_site(names: BindingNames) -> None:
    manifest = make_manifest(names=names)
    assert manifest.lora_bindings == {
        names.binding(factor, site.path): (site, factor)
        for site in manifest.sites
        for factor in ("A", "B")
    }
    assert set(manifest.lora_bindings) <= {binding.name for binding in manifest.inputs}


def test_a_directory_without_a_manifest_is_no_engine(tmp_path: Path) -> None:
    assert_refused(tmp_path, "has no manifest.json", "build-engine --model DIR --output DIR")


def test_a_directory_that_is_not_there_is_said_to_be_so_with_the_name_that_was_meant(
    tmp_path: Path,
) -> None:
    (tmp_path / "nowhere").mkdir()
    write_engine(tmp_path / "nowhere")
    assert_refused(tmp_path / "nowhre", "nowhre does not exist", "did you mean 'nowhere'?")
    assert_refused(tmp_path / "a" / "b", "b does not exist")


def test_the_engines_in_a_directory_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_engine(tmp_path / name)
    inside = f"{tmp_path / 'one'}, {tmp_path / 'two'}"
    assert_refused(tmp_path, f"is not an engine directory; pass one that lies in it: {inside}")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "\ud800", "\udcff/a"])
def test_a_path_that_no_directory_can_have_is_refused_on_one_line(name: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(Path(name))
    message = str(caught.value)
    assert "\n" not in message
    message.encode()  # any stream takes it


def test_a_file_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(PLAN)
    assert_refused(tmp_path / "file", "is not an engine directory")


@pytest.mark.parametrize(
    ("version", "cure"),
    [(1, "build the engine again"), (3, "install a newer trt-lora"), (999, "install a newer")],
)
def test_another_schema_is_refused_with_both_versions_and_the_cure(
    tmp_path: Path, version: int, cure: str
) -> None:
    write_engine(tmp_path, schema_version=version)
    assert_refused(tmp_path, f"schema version is {version}, this release reads 2; {cure}")


@pytest.mark.parametrize("version", ["2", 2.5, True, [2]])
def test_a_version_that_is_no_whole_number_is_damage(tmp_path: Path, version: object) -> None:
    write_engine(tmp_path, schema_version=version)
    assert_refused(tmp_path, f"version is {version!r}, ", "build the engine again")


FIELDS = [field.name for field in dataclasses.fields(Manifest)]


OPTIONAL = (
    "lora_plugin",
    "compute_capability",
    "max_loras",
    "weights",
    "lora_vectors",
    "saved_modules",
    "matrices",
    "second_stream",
    "encoder",
    "component",
    "no_effect",
    "batch",
    "kind",
)
PYTHONS_WORDS = ("Error", "Manifest", "BaseModel", "BindingNames", "__init__", "argument")


def refusal(directory: Path) -> str:
    """What is said of a damaged manifest, without its path and without words of Python's."""
    with pytest.raises(ManifestError) as caught:
        read_manifest(directory)
    text = str(caught.value)
    assert text.count(str(directory)) == 1
    said = text.replace(str(directory / "manifest.json"), "")
    assert [word for word in PYTHONS_WORDS if word in said] == []
    return said


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in OPTIONAL])
def test_a_missing_field_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_engine(tmp_path, **{name: None})
    assert refusal(tmp_path) == f" cannot be read: {name} is missing; build the engine again"


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [[1], 1.5, {"a": 1}])
def test_a_field_of_another_type_is_refused(tmp_path: Path, name: str, value: object) -> None:
    write_engine(tmp_path, **{name: value})
    assert refusal(tmp_path).endswith("; build the engine again")


@pytest.mark.parametrize("place", ["base_model", "sites", "inputs", "files"])
def test_a_part_that_is_missing_further_in_is_refused_by_name(tmp_path: Path, place: str) -> None:
    parts = json.loads(write_engine(tmp_path).to_json())
    inner = {
        "base_model": lambda: parts["base_model"],
        "sites": lambda: parts["sites"][0],
        "inputs": lambda: parts["inputs"][0],
        "files": lambda: parts["files"]["engine.plan"],
    }[place]()
    field = next(iter(inner))
    del inner[field]
    (tmp_path / "manifest.json").write_text(json.dumps(parts))
    assert refusal(tmp_path) == f" cannot be read: {field} is missing; build the engine again"


def test_an_unknown_form_of_the_plugin_is_refused_with_the_choices(tmp_path: Path) -> None:
    write_engine(tmp_path, lora_plugin="magic")
    assert_refused(tmp_path, "expected one of native, plugin, aot")


def test_a_field_of_a_later_release_is_refused_by_name(tmp_path: Path) -> None:
    write_engine(tmp_path, slots=4)
    said = " cannot be read: 'slots' is not known to this release; install a newer trt-lora"
    assert refusal(tmp_path) == said


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    assert refusal(tmp_path).endswith("; build the engine again")


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    assert refusal(tmp_path).startswith(" is not JSON: ")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    write_engine(tmp_path)
    (tmp_path / "engine.plan").unlink()
    assert_refused(tmp_path, "engine.plan is missing", f"says {len(PLAN)}", "incomplete")


@pytest.mark.parametrize("data", [b"", PLAN[:-1], PLAN + b"x"])
def test_a_file_of_another_size_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    write_engine(tmp_path)
    (tmp_path / "engine.plan").write_bytes(data)
    assert_refused(tmp_path, f"engine.plan has {len(data)} bytes, the manifest says {len(PLAN)}")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", ""])
def test_a_file_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    write_engine(tmp_path, files={name: {"size_bytes": 1, "sha256": "0"}})
    assert_refused(tmp_path, "leads out of the engine directory")


def test_an_engine_of_an_earlier_release_takes_one_adapter_at_a_time(tmp_path: Path) -> None:
    write_engine(tmp_path, max_loras=None)
    manifest = read_manifest(tmp_path)
    assert (manifest.max_loras, manifest.lora_mode) == (0, "single")
    assert manifest.lora_inputs == set(manifest.lora_bindings)


def test_an_engine_with_slots_has_two_inputs_beside_the_stacks(tmp_path: Path) -> None:
    write_engine(tmp_path, max_loras=3)
    manifest = read_manifest(tmp_path)
    assert manifest.lora_mode == "slots"
    assert manifest.lora_inputs - set(manifest.lora_bindings) == {"lora_slot", "lora_rank"}


def test_a_negative_number_of_slots_is_refused(tmp_path: Path) -> None:
    write_engine(tmp_path, max_loras=-1)
    assert_refused(tmp_path, "max_loras is -1, expected 0 or more")


def test_an_engine_without_sites_is_read(tmp_path: Path) -> None:
    write_engine(tmp_path, sites=[])
    assert read_manifest(tmp_path).lora_bindings == {}


def test_each_kind_says_only_what_is_of_it() -> None:
    manifest = make_manifest()
    graph = json.loads(dataclasses.replace(manifest, kind="graph").to_json())
    own = json.loads(manifest.to_json())
    lengths = {"max_batch_size", "max_input_len", "max_seq_len"}
    assert own.keys() - graph.keys() == lengths
    assert graph.keys() - own.keys() == {"batch", "kind"}
    tokens = {"stop_token_ids", "pad_token_id"}
    assert own["base_model"].keys() - graph["base_model"].keys() == tokens
