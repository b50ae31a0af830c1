"""DoRA and biases beside B, end to end: an engine with vectors answers as PEFT does."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters.peft_fields import CONFIG, WEIGHTS
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.slot_rows import Ids, SlotRows
from support.models.tiny_models import VOCABULARY, tiny_config
from support.models.vector_engine import VectorEngine, vector_engine
from support.refusals import refused

from trt_lora.builder.passes.codes.coded_weight import coded_weights
from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, load_adapter, open_engine
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, read_manifest
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.logits import forced_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow

ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "plain": {},
}
RELATIVE = 1e-5  # of the largest logit
STEPS = 6


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Qwen2", "Phi3"])
def test_every_adapter_answers_as_peft_does(architecture: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        built = vector_engine(architecture, tmp_path, stack, ADAPTERS)
        manager = LoRAManager()
        manager.initialize_engine_bindings(built.engine)
        for name, path in built.adapters.items():
            manager.load_weights(name, path)
        reference = PeftReference(built.model, built.adapters)
        plain = engine_logits(built.engine, manager, "")
        for name in ("", *built.adapters, ""):
            ours = engine_logits(built.engine, manager, name)
            theirs = reference.logits(name, *batch())
            assert largest_error(ours, theirs) < RELATIVE * np.abs(theirs).max()
            assert name == "" or largest_error(ours, plain) > 1000 * RELATIVE


def test_rows_with_other_adapters_answer_as_each_does_alone(tmp_path: Path) -> None:
    rows = {"r0": "dora", "r1": None, "r2": "bias", "r3": "plain", "r4": "dora"}
    with ExitStack() as stack:
        built = vector_engine(
            "Llama", tmp_path, stack, ADAPTERS, max_loras=3, max_batch_size=len(rows)
        )
        store = AdapterStore(built.engine)
        for name, path in built.adapters.items():
            store.load(name, path)
        running = SlotRows(built.engine, store)
        ids = {row: ids_of(row) for row in rows}
        found = {row: [running.join(row, rows[row], ids[row][:-STEPS])] for row in rows}
        for step in range(STEPS, 0, -1):
            for row, logits in running.step({row: int(ids[row][-step]) for row in rows}).items():
                found[row].append(logits.copy())
    reference = PeftReference(built.model, built.adapters)
    for row, adapter in rows.items():
        theirs = reference.logits(adapter or "", ids[row][None], np.ones_like(ids[row][None]))[0]
        ours = np.concatenate(found[row])
        assert np.abs(ours - theirs).max() < RELATIVE * np.abs(theirs).max(), row


def ids_of(row: str) -> Ids:
    """A prompt of a length of its own, and STEPS tokens behind it."""
    number = int(row[1:])
    return np.random.default_rng(number).integers(3, VOCABULARY, 3 + 2 * number + STEPS)


# ----------------------------------------------------------------------------- one engine, shared


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorEngine]:
    with ExitStack() as stack:
        yield vector_engine("Llama", tmp_path_factory.mktemp("llama"), stack, ADAPTERS)


def bound(engine: Engine, **adapters: Path) -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for name, path in adapters.items():
        manager.load_weights(name, path)
    return manager


def convert(*arguments: str | Path) -> None:
    main(["convert-adapter", *map(str, arguments)])


def test_dora_changes_the_answer_and_not_by_its_a_and_b_alone(
    llama: VectorEngine, tmp_path: Path
) -> None:
    plain = shutil.copytree(llama.adapters["dora"], tmp_path / "plain")
    config = json.loads((plain / CONFIG).read_text())
    (plain / CONFIG).write_text(json.dumps(config | {"use_dora": False}))
    tensors = load_file(plain / WEIGHTS)
    kept = {name: t for name, t in tensors.items() if "magnitude" not in name}
    assert len(kept) == len(tensors) * 2 / 3
    save_file(kept, plain / WEIGHTS)
    manager = bound(llama.engine, dora=llama.adapters["dora"], plain=plain)
    with_d, without = (engine_logits(llama.engine, manager, n) for n in ("dora", "plain"))
    assert largest_error(with_d, without) > 0.01


def test_the_graph_without_lora_has_no_vector_and_the_same_logits(
    llama: VectorEngine, tmp_path: Path
) -> None:
    plain = engine_without_lora(llama.engine.directory, tmp_path)
    ours = engine_logits(llama.engine, bound(llama.engine), "")
    for name in (ONNX_FILE, ONNX_CPU_FILE):
        model = ir.load(plain / name)
        assert not [value for value in model.graph.inputs if "lora" in str(value.name)]
    manifest, ids = read_manifest(plain), batch()[0][1:]
    assert not manifest.lora_bindings
    with open_engine(plain) as engine:
        (theirs,) = forced_logits(engine, TensorMap(), ids.tolist(), STEPS)
    np.testing.assert_allclose(ours[1], theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "kind"), [("base", "edgellm"), ("engine", "edgellm"), ("engine", "onnxruntime")]
)
def test_a_converted_adapter_needs_no_weights_and_answers_alike(
    llama: VectorEngine, option: str, kind: str, tmp_path: Path
) -> None:
    directory = llama.model if option == "base" else llama.engine.directory
    out = tmp_path / ("out.onnx_adapter" if kind == "onnxruntime" else "out")
    given = ["--format", kind, "--dtype", "float32", f"--{option}", str(directory)]
    convert(llama.adapters["dora"], out, *given)
    adapter = load_adapter(out)
    assert "magnitude" not in {kind for kind, _ in adapter.vectors}
    assert fit_adapter(adapter, llama.engine.manifest).coverage.is_taken  # no directory
    manager = bound(llama.engine, a=llama.adapters["dora"], b=out)
    first, second = (engine_logits(llama.engine, manager, name) for name in "ab")
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)


def test_a_conversion_without_a_base_is_refused(llama: VectorEngine, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        convert(llama.adapters["dora"], tmp_path / "out", "--format", "edgellm")
    assert not (tmp_path / "out").exists()


def test_codes_make_dora_of_what_they_are(tmp_path: Path) -> None:
    with ExitStack() as stack:
        built = vector_engine(
            "Llama", tmp_path, stack, ADAPTERS, quantize="int8", quantize_level="exact"
        )
        with refused(AdapterError, "DoRA needs the weight of", "--base DIR"):
            bound(built.engine, dora=built.adapters["dora"])
        convert(
            *(built.adapters["dora"], tmp_path / "out", "--format", "edgellm"),
            *("--dtype", "float32", "--engine", built.engine.directory),
        )
        manager = bound(built.engine, dora=tmp_path / "out")
        ours = engine_logits(built.engine, manager, "dora")
        codes = coded_weights(ir.load(built.engine.directory / ONNX_FILE))
        weights = {path: weight.dequantised() for path, weight in codes}
        reference = PeftReference(built.model, built.adapters, weights=weights)
        theirs = reference.logits("dora", *batch())
    assert largest_error(ours, theirs) < RELATIVE * np.abs(theirs).max()


def test_an_engine_without_vectors_refuses_both_by_name(
    llama: VectorEngine, tmp_path: Path
) -> None:
    quick_build(tiny_config(llama.model, tmp_path / "e"))
    with open_engine(tmp_path / "e") as engine:
        for name, field in (("dora", "use_dora"), ("bias", "lora_bias")):
            with refused(AdapterError, f"{field} is True", "trt-lora merge", "--lora-vectors"):
                bound(engine, a=llama.adapters[name])


def test_a_build_for_adapters_with_vectors_needs_them(llama: VectorEngine, tmp_path: Path) -> None:
    options = {"lora_dirs": (llama.adapters["dora"],), "target_modules": ()}
    with refused(AdapterError, "use_dora is True", "--lora-vectors"):
        quick_build(tiny_config(llama.model, tmp_path / "e", **options))
    quick_build(tiny_config(llama.model, tmp_path / "e", lora_vectors=True, **options))


def test_inspect_lists_vectors(llama: VectorEngine, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = str(llama.adapters["dora"])
    main(["inspect", str(llama.engine.directory), "--adapter", adapter, "--full"])
    said = capsys.readouterr().out
    assert "lora_scale_model.layers.0.self_attn.q_proj <- base_model.model.model.layers.0" in said
    assert "lora_bias" not in said


def test_half_precision_stays_close_to_peft(llama: VectorEngine, tmp_path: Path) -> None:
    options = {"dtype": "float16", "max_loras": 2, "lora_vectors": True}
    quick_build(tiny_config(llama.model, tmp_path / "e", **options))
    reference = PeftReference(llama.model, llama.adapters)
    with open_engine(tmp_path / "e") as engine:
        manager = bound(engine, dora=llama.adapters["dora"])
        error = largest_error(
            engine_logits(engine, manager, "dora"), reference.logits("dora", *batch())
        )
    assert 0 < error < 0.03
