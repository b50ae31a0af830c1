"""A manifest that contradicts itself or its graph is refused when the engine is opened."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyEngine
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import KEY, engine_directory, slots_manifest, small_manifest

from trt_lora.plugins.contract.sites import MAX_RANK
from trt_lora.plugins.errors import BackendError, ManifestError
from trt_lora.runtime import open_engine
from trt_lora.runtime.engines.interface import check_manifest
from trt_lora.runtime.files.stored_matrix import StoredMatrix
from trt_lora.runtime.manifest import MANIFEST_FILE, PLAN_FILE, Manifest, load_manifest

Fields = dict[str, Any]
HUGE = 10**30


def refused(
    directory: Path, edit: Callable[[Fields], object], error: type[Exception], *said: str
) -> None:
    """Opening and entering an engine with an edited manifest says each of these."""
    fields = json.loads((directory / MANIFEST_FILE).read_text())
    edit(fields)
    (directory / MANIFEST_FILE).write_text(json.dumps(fields))
    with pytest.raises(error) as caught, open_engine(directory):
        pass
    message = str(caught.value)
    assert [text for text in (*said, "build", str(directory)) if text not in message] == []


@pytest.fixture
def onnx(tiny_engine: TinyEngine, tmp_path: Path) -> Path:
    """A copy of the tiny engine, which runs on ONNX Runtime."""
    return shutil.copytree(tiny_engine.engine, tmp_path / "onnx")


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    """The directory of an engine with slots and a static cache, whose graph says nothing."""
    return engine_directory(tmp_path / "slots", slots_manifest(3))


def named(bindings: list[Fields], name: str) -> Fields:
    return next(binding for binding in bindings if binding["name"] == name)


# ---------------------------------------------------------------------- without the engine's file


@pytest.mark.parametrize("manifest", [small_manifest(), slots_manifest(2)])
def test_a_manifest_as_it_is_built_contradicts_itself_in_nothing(manifest: Manifest) -> None:
    check_manifest(Path("engine"), manifest)


@pytest.mark.parametrize(("path", "k"), [(None, 7), ("elsewhere", 8)])
def test_a_matrix_is_that_of_a_site(path: str | None, k: int) -> None:
    manifest = small_manifest()
    site = manifest.sites[0]
    right = replace(manifest, matrices={site.path: StoredMatrix(0, "float32", site.k, site.n)})
    check_manifest(Path("engine"), right)
    wrong = {path or site.path: StoredMatrix(0, "float32", k, site.n)}
    with pytest.raises(ManifestError, match=rf"the matrix of .* is \[{k}, {site.n}\] at 0"):
        check_manifest(Path("engine"), replace(manifest, matrices=wrong))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_batch_size", 0, "max_batch_size is 0, expected 1 to any"),
        ("max_seq_len", -5, "max_seq_len is -5"),
        ("max_input_len", 17, "max_input_len is 17, expected 1 to 16"),
        ("max_lora_rank", HUGE, f"max_lora_rank is {HUGE}, expected 1 to {MAX_RANK}"),
        ("opt_lora_rank", 5, "opt_lora_rank is 5, expected 1 to 4"),
    ],
)
def test_numbers_are_within_each_other(tmp_path: Path, field: str, value: int, said: str) -> None:
    directory = engine_directory(tmp_path / "engine", small_manifest())
    refused(directory, lambda fields: fields.update({field: value}), ManifestError, said)


def swapped_outputs(fields: Fields) -> None:
    fields["outputs"].reverse()


def logits_without_vocabulary(fields: Fields) -> None:
    fields["outputs"][0]["shape"][-1] = "any"


def a_stop_token_beyond_it(fields: Fields) -> None:
    fields["base_model"]["stop_token_ids"] = [11]


def an_input_twice(fields: Fields) -> None:
    fields["inputs"].append(fields["inputs"][0])


def an_unknown_dtype(fields: Fields) -> None:
    fields["inputs"][0]["dtype"] = "int65"


def a_negative_size(fields: Fields) -> None:
    named(fields["inputs"], KEY)["shape"][1] = -1


def a_site_without_inputs(fields: Fields) -> None:
    fields["sites"][0]["path"] = "model.layers.0.left"


def a_site_twice(fields: Fields) -> None:
    fields["sites"].append(fields["sites"][0])


def inputs_without_a_site(fields: Fields) -> None:
    fields["sites"].pop(0)


def another_dtype(fields: Fields) -> None:
    fields["dtype"] = "float16"


def a_site_of_another_size(fields: Fields) -> None:
    fields["sites"][0]["k"] = 5


def a_site_of_another_dtype(fields: Fields) -> None:
    fields["sites"][0]["dtype"] = "float16"


def parts_that_are_less(fields: Fields) -> None:
    fields["sites"][0]["parts"] = [1, 2]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (swapped_outputs, "expected logits"),
        (logits_without_vocabulary, "the first output"),
        (a_stop_token_beyond_it, "beyond 11 tokens"),
        (an_input_twice, "inputs have a name twice"),
        (an_unknown_dtype, "input_ids is 'int65'"),
        (a_negative_size, f"{KEY} is 'float32' ['batch', -1"),
        (a_site_without_inputs, "model.layers.0.left has no input"),
        (a_site_twice, "sites have a path twice"),
        (inputs_without_a_site, "lora_A_model.layers.0.up is the input of no site"),
        (another_dtype, "dtype is 'float16', which no input or output has"),
        (a_site_of_another_size, "its site has k 5 and n 6"),
        (a_site_of_another_dtype, "lora_A_model.layers.0.up is"),
        (parts_that_are_less, "the parts (1, 2) of model.layers.0.up are not 6 together"),
    ],
)
def test_bindings_and_sites_are_of_one_engine(
    tmp_path: Path, edit: Callable[[Fields], None], said: str
) -> None:
    directory = engine_directory(tmp_path / "engine", small_manifest())
    refused(directory, edit, ManifestError, said)


def outputs_in_each_others_place(fields: Fields) -> None:
    first, second = fields["outputs"][1:3]
    first["in_place_of"], second["in_place_of"] = second["in_place_of"], first["in_place_of"]


def a_cache_of_other_places(fields: Fields) -> None:
    fields["max_seq_len"] += 1


def an_output_fewer(fields: Fields) -> None:
    fields["outputs"].pop()


def one_adapter_for_all(fields: Fields) -> None:
    fields["max_loras"] = 0


def more_slots(fields: Fields) -> None:
    fields["max_loras"] = HUGE


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (outputs_in_each_others_place, "is in place of"),
        (a_cache_of_other_places, "tokens in a row"),
        (an_output_fewer, "the KV cache has 2 inputs and 1 outputs"),
        (one_adapter_for_all, "max_loras is 0"),
        (more_slots, f"has {{(3,)}} slots, max_loras is {HUGE}"),
    ],
)
def test_a_cache_and_slots_are_those_of_the_inputs(
    slots: Path, edit: Callable[[Fields], None], said: str
) -> None:
    refused(slots, edit, ManifestError, said)


@pytest.mark.parametrize("backend", ["auto", "onnxruntime"])
def test_a_manifest_without_files_is_refused(slots: Path, backend: str) -> None:
    fields = json.loads((slots / MANIFEST_FILE).read_text())
    (slots / MANIFEST_FILE).write_text(json.dumps({**fields, "files": {}}))
    with pytest.raises(ManifestError, match=r"says nothing of model\.onnx and model\.onnx\.data"):
        open_engine(slots, backend)


def test_a_plan_that_the_manifest_does_not_know_is_refused(slots: Path, trt: FakeTensorRT) -> None:
    fields = json.loads((slots / MANIFEST_FILE).read_text())
    del fields["files"][PLAN_FILE]
    (slots / MANIFEST_FILE).write_text(json.dumps(fields))
    with pytest.raises(ManifestError, match=r"says nothing of engine\.plan"):
        open_engine(slots, "tensorrt")


# --------------------------------------------------------------------------- with the engine's file


def another_vocabulary(fields: Fields) -> None:
    fields["outputs"][0]["shape"][-1] += 1


def another_cache(fields: Fields) -> None:
    output = fields["outputs"][1]
    named(fields["inputs"], output["in_place_of"])["name"] = output["in_place_of"] = "cache.7.key"
    output["name"] = "new_cache.7.key"


def more_heads(fields: Fields) -> None:
    output = fields["outputs"][1]
    for binding in (output, named(fields["inputs"], output["in_place_of"])):
        binding["shape"][1] += 1


def tokens_of_32_bits(fields: Fields) -> None:
    named(fields["inputs"], "input_ids")["dtype"] = "int32"


def a_batch_of_one(fields: Fields) -> None:
    named(fields["inputs"], "input_ids")["shape"][0] = 1


def an_input_more(fields: Fields) -> None:
    fields["inputs"].append({**fields["inputs"][0], "name": "extra"})


def an_input_fewer(fields: Fields) -> None:
    fields["inputs"] = [item for item in fields["inputs"] if item["name"] != "lengths"]


@pytest.mark.parametrize(
    ("edit", "kind", "said"),
    [
        (another_vocabulary, "outputs", "logits is float32 ["),
        (another_cache, "inputs", "no cache.7.key; cache.0.key too"),
        (more_heads, "inputs", "cache.0.key is float32 ["),
        (tokens_of_32_bits, "inputs", "input_ids is int64 ["),
        (a_batch_of_one, "inputs", "and not int64 [1, 'sequence']"),
        (an_input_more, "inputs", "no extra"),
        (an_input_fewer, "inputs", "lengths too"),
    ],
)
def test_a_graph_has_the_inputs_and_outputs_of_its_manifest(
    onnx: Path, edit: Callable[[Fields], None], kind: str, said: str
) -> None:
    refused(onnx, edit, BackendError, f"has other {kind} than its manifest", said)


def test_a_plan_has_the_inputs_and_outputs_of_its_manifest(
    tmp_path: Path, trt: FakeTensorRT
) -> None:
    """TensorRT may tell a dimension as any that the manifest knows."""
    directory = engine_directory(tmp_path / "engine")
    manifest = load_manifest(directory)
    wider = [replace(output, shape=("kept", "any")) for output in manifest.outputs[:1]]
    trt.manifest = replace(manifest, outputs=(*wider, *manifest.outputs[1:]))
    with open_engine(directory, "tensorrt"):
        pass
    for changed, said in (
        (replace(manifest.outputs[0], shape=("kept", 12)), "logits is float32 ['any'"),
        (replace(manifest.outputs[0], dtype="float16"), "logits is float16"),
        (replace(manifest.outputs[0], name="scores"), "no logits; scores too"),
    ):
        trt.manifest = replace(manifest, outputs=(changed, *manifest.outputs[1:]))
        with pytest.raises(BackendError, match=r"engine\.plan has other outputs") as caught:
            open_engine(directory, "tensorrt").__enter__()
        assert said in str(caught.value)
    trt.manifest = replace(manifest, inputs=manifest.inputs[1:])
    with (
        pytest.raises(BackendError, match="other inputs than its manifest: no input_ids"),
        open_engine(directory, "tensorrt"),
    ):
        pass
    assert not list(trt.contexts)


def test_a_refused_graph_leaves_no_file_open(onnx: Path) -> None:
    another = json.loads((onnx / MANIFEST_FILE).read_text())
    another["outputs"][0]["shape"][-1] += 1
    (onnx / MANIFEST_FILE).write_text(json.dumps(another))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with (
            pytest.raises(BackendError, match="other outputs than"),
            open_engine(onnx, "onnxruntime"),
        ):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
