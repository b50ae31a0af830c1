"""The trial at the end of a build: a file that ONNX Runtime does not run is the build's failure."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conftest import TinyEngine
from support.build_progress import Notes
from support.models.quantised import FOLDER
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.builder.save_graphs import save_graphs
from trt_lora.builder.trial_step import try_onnx_files
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE

TOO_LARGE = "was not tried: it takes about 0.0 GB of memory, 0.0 GB are free"


def damage(path: Path, op_type: str, domain: str, *operands: ir.Value) -> None:
    """Let a graph read its ids through another operator."""
    model = ir.load(path)
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    node = ir.node(op_type, [ids, *operands], domain=domain)
    node.outputs[0].type, node.outputs[0].shape = ids.type, ids.shape
    ir.convenience.replace_all_uses_with(ids, node.outputs[0])
    node.replace_input_with(0, ids)
    model.graph.insert_before(model.graph[0], node)
    model.graph.opset_imports.setdefault(domain, 1)
    for operand in operands:
        model.graph.register_initializer(operand)
    ir.save(model, path)


def unknown_operator(path: Path) -> None:
    """Make a file that ONNX Runtime does not open."""
    damage(path, "Nothing", "nowhere")


def impossible_shape(path: Path) -> None:
    """Make a file that ONNX Runtime opens and does not run."""
    shape = ir.tensor(np.array([5, 7]), name="shape")
    damage(path, "Reshape", "", ir.Value(name="shape", const_value=shape))


@pytest.mark.parametrize("options", [{}, {"max_loras": 2}], ids=["one adapter", "slots"])
@pytest.mark.parametrize("file", [ONNX_FILE, ONNX_CPU_FILE])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unknown_operator, "ONNX Runtime cannot load .*: .* nowhere:Nothing"),
        (impossible_shape, "ONNX Runtime refuses these inputs: .* Reshape"),
    ],
    ids=["is not opened", "does not run"],
)
def test_a_file_that_onnx_runtime_does_not_run_is_the_builds_failure_and_nothing_stays(
    change: Callable[[Path], None],
    reason: str,
    file: str,
    options: dict[str, Any],
    tiny_engine: TinyEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save(model: ir.Model, work: Path, level: str, tokens: int) -> None:
        save_graphs(model, work, level, tokens)
        change(work / file)

    monkeypatch.setattr("trt_lora.builder.write_engine.save_graphs", save)
    config = tiny_config(tiny_engine.model, tmp_path / "engine", **options)
    with pytest.raises(ModelError) as raised:
        quick_build(config)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'engine' / file} would not run: ")
    assert re.search(f"run: {reason}.*; build it with another --dtype", message)
    assert "/.engine." not in message  # the scratch directory is nobody's
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ("onnxruntime", r"the ONNX files were .* cannot be imported .* 'trt-lora\[cpu\]'"),
        ("memory", "".join(f"{file} {TOO_LARGE}" for file in (ONNX_CPU_FILE, ONNX_FILE))),
    ],
)
def test_where_files_cannot_be_tried_a_note_says_why_and_the_engine_is_made(
    planted: str,
    reason: str,
    tiny_engine: TinyEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if planted == "onnxruntime":
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    else:
        monkeypatch.setattr("trt_lora.builder.trial_step.free_host_memory", lambda: 1)
    notes = Notes()
    quick_build(tiny_config(tiny_engine.model, tmp_path / "engine"), notes)
    assert read_manifest(tmp_path / "engine")
    told = "".join(note for note in notes.notes if "not tried" in note)
    assert re.fullmatch(reason, told)


def test_a_bfloat16_engine_is_not_tried(tiny_engine: TinyEngine) -> None:
    manifest, notes = read_manifest(tiny_engine.engine), Notes()
    folder = tiny_engine.engine
    try_onnx_files(folder, folder, replace(manifest, dtype="bfloat16"), notes)
    reason = "ONNX Runtime has no bfloat16 on the CPU"
    assert notes.notes == [f"the ONNX files were not tried: {reason}"]


@pytest.mark.slow
def test_a_file_of_codes_is_tried_where_there_is_room_for_their_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an operator for codes, the floats of all are there at once, and their transposes."""
    manifest = quick_build(tiny_config(FOLDER / "gptq_sym", engine := tmp_path / "engine"))
    stored = manifest.files[ONNX_WEIGHTS_FILE].size_bytes
    floats = 2 * 4 * sum(n * k for n, k in (kind.shape for kind in manifest.weights.values()))
    assert floats > 5 * stored
    for free, refused in ((stored - 1, 2), (stored, 1), (floats, 1), (floats + stored, 0)):
        monkeypatch.setattr("trt_lora.builder.trial_step.free_host_memory", lambda free=free: free)
        try_onnx_files(engine, engine, manifest, notes := Notes())
        files = (ONNX_CPU_FILE, ONNX_FILE)[2 - refused :]
        assert notes.notes == [f"{file} {TOO_LARGE}" for file in files]
