"""`trt-lora compare`: what it runs, finds and keeps, and what it says of bad input."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import TinyEngine
from safetensors.numpy import load_file, save_file
from support.planted_faults import copy_of, cross_wires
from support.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder import build_engine
from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.comparison.files import (
    Accuracy,
    OutputDifference,
    check_complete,
    load_accuracy,
    save_inputs,
)
from trt_lora.scripts.comparison.onnx_variants import write_model
from trt_lora.scripts.comparison.references import ComparisonCase, NativePlan
from trt_lora.scripts.comparison.report import row_of
from trt_lora.scripts.comparison.runners import runner_text
from trt_lora.scripts.comparison.shell_commands import Command
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.example_inputs import InputSpec, make_inputs

ONNXRT = f"ONNX Runtime {onnxruntime.__version__} (CPU)"
Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))


def compare(*arguments: str | Path) -> int:
    """Run it and return the exit status."""
    try:
        main(["compare", *(str(argument) for argument in arguments)])
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def outputs_of(onnx: Path, inputs: dict[str, Any]) -> dict[str, Array]:
    """Run a file on ONNX Runtime, on the inputs that it takes."""
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    taken = {value.name: inputs[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    arrays = map(np.asarray, session.run(names, taken))
    return dict(zip(names, arrays, strict=True))


def largest_error(ours: dict[str, Array], theirs: dict[str, Array]) -> float:
    assert list(ours) == list(theirs)
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


# ------------------------------------------------------------------------------------ the variants


@pytest.fixture(scope="module", params=["Llama", "GPT2", "Phi3"])
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Residuals, gates, tied embeddings; Gemm with a bias; fused linears. Inputs are beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder / "model", tie_word_embeddings=True)
    adapter = save_adapter(model, folder / "adapter", r=4)
    build_engine(tiny_config(model, folder / "engine"))
    steps = make_inputs(
        folder / "engine", read_manifest(folder / "engine"), InputSpec(adapter=adapter, seed=3)
    )
    save_inputs(steps, folder / "inputs")
    np.savez(
        folder / "steps.npz", **{f"{i}/{n}": v for i, s in enumerate(steps) for n, v in s.items()}
    )
    return folder / "engine"


def steps_of(engine: Path) -> list[dict[str, Any]]:
    found = np.load(engine.parent / "steps.npz")
    return [
        {name[2:]: found[name] for name in found.files if name.startswith(f"{step}/")}
        for step in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [("merged", 1e-4), ("float64", 1e-4), ("engine", 0)])
def test_every_variant_computes_what_the_engine_does(
    any_engine: Path, tmp_path: Path, kind: str, expected: float
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in any_engine.iterdir()}
    write_model(kind, any_engine, tmp_path / "a.onnx", any_engine.parent / "inputs")
    for inputs in steps_of(any_engine):
        engine = outputs_of(any_engine / ONNX_FILE, inputs)
        variant = outputs_of(tmp_path / "a.onnx", inputs)
        assert largest_error(engine, variant) <= expected
        base = {n: np.zeros_like(v) if "lora_" in n else v for n, v in inputs.items()}
        assert largest_error(engine, outputs_of(any_engine / ONNX_FILE, base)) > 0.01
    assert before == {path.name: path.stat().st_mtime_ns for path in any_engine.iterdir()}


@pytest.mark.slow
def test_a_merged_model_takes_no_lora_inputs_and_a_float64_one_differs_by_rounding_alone(
    any_engine: Path, tmp_path: Path
) -> None:
    (inputs, _) = steps_of(any_engine)
    write_model("merged", any_engine, tmp_path / "m.onnx", any_engine.parent / "inputs")
    write_model("float64", any_engine, tmp_path / "f.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert not [value.name for value in session.get_inputs() if "lora" in value.name]
    ours, wide = (
        outputs_of(path, inputs) for path in (any_engine / ONNX_FILE, tmp_path / "f.onnx")
    )
    assert 0 < largest_error(ours, wide) < 1e-4


# ------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_a_comparison_is_kept_and_runs_again_elsewhere(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, adapter = tmp_path / "kept", f"a={tiny_engine.adapter}"
    assert compare(tiny_engine.engine, "--adapter", adapter, "--keep", kept) == 0
    header, base, adapted, last = capsys.readouterr().out.splitlines()
    assert cells(header)[:3] == ["engine", "compared with", "adapter"]
    assert cells(base)[:5] == [ONNXRT, f"merged weights, {ONNXRT}", "base", "10", "0.00e+00"]
    assert cells(adapted)[2] == "a"
    assert 0 < float(cells(adapted)[4]) < 1e-4
    assert last == f"tolerance 0.001, relative 0.0001; kept in {kept}"
    assert not (kept / "models").exists()

    report = json.loads((kept / "report.json").read_text())
    assert report["versions"]["polygraphy"] == importlib.metadata.version("polygraphy")
    assert set(report["adapters"]["a"]) >= {"adapter_config.json", "adapter_model.safetensors"}
    assert (kept / MANIFEST_FILE).read_bytes() == (tiny_engine.engine / MANIFEST_FILE).read_bytes()
    found = errors_of(kept / "accuracy" / "a.json")

    elsewhere = tmp_path / "elsewhere"
    kept.rename(elsewhere)
    (elsewhere / "accuracy" / "a.json").unlink()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "ENGINE": str(tiny_engine.engine)}
    subprocess.run(["sh", "commands.sh"], cwd=elsewhere, env=environment, check=True)
    assert errors_of(elsewhere / "accuracy" / "a.json") == found
    assert not (elsewhere / "models").exists()


def cells(line: str) -> list[str]:
    """The cells of a line of the table."""
    return re.split(" {2,}", line.strip())


def errors_of(path: Path) -> list[tuple[str, float, bool]]:
    return [(error.name, error.largest, error.within) for error in load_accuracy(path).errors]


@pytest.mark.slow
def test_peft_and_float64_agree_with_the_engine(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = ("--adapter", f"a={tiny_engine.adapter}", "--json")
    peft = ("--against", "peft", "--model", tiny_engine.model, "--keep", tmp_path / "peft")
    assert compare(tiny_engine.engine, *adapter, *peft) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    versions = [importlib.metadata.version(name) for name in ("transformers", "peft")]
    peft_text = "transformers {} + peft {} (CPU, float32)".format(*versions)
    assert [(row["engine"], row["reference"]) for row in rows] == [(ONNXRT, peft_text)] * 2
    assert all(row["outputs"] == 10 and 0 < row["largest"] < 1e-4 for row in rows)

    native = ("--against", "native", "--keep", tmp_path / "native")
    assert compare(tiny_engine.engine, *adapter, *native) == 0
    report = json.loads(capsys.readouterr().out)
    assert "the engine has no plan" in report["note"]
    assert {row["reference"] for row in report["rows"]} == {f"LoRA in float64, {ONNXRT}"}
    assert [row["largest"] < 1e-4 for row in report["rows"]] == [True] * 2


@pytest.mark.slow
def test_another_build_in_another_dtype_with_other_names_and_limits_agrees(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "dtype": "float16",
        "binding_names": BindingNames.EDGELLM,
        "max_batch_size": 1,
    }
    config = tiny_config(
        tiny_engine.model, tmp_path / "half", target_modules=("attn_q", "attn_v"), **options
    )
    build_engine(replace(config, max_input_len=8))
    against = ("--against", tmp_path / "half", "--keep", tmp_path / "kept", "--json")
    assert compare(tiny_engine.engine, "--adapter", f"a={tiny_engine.adapter}", *against) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tolerance"] == {"absolute": 0.5, "relative": 0.05}
    assert all(1e-5 < row["largest"] < 0.1 for row in report["rows"])
    assert {row["reference"] for row in report["rows"]} == {f"the other engine, {ONNXRT}"}


@pytest.mark.slow
def test_a_difference_is_named_and_exits_with_1(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = copy_of(tiny_engine.engine, tmp_path / "wrong")
    cross_wires(wrong, Q1, Q0)
    kept = ("--keep", tmp_path / "kept", "--bisect")
    assert compare(wrong, "--adapter", f"a={tiny_engine.adapter}", *kept) == 1
    _, base, adapted, fault, _ = capsys.readouterr().out.splitlines()
    assert base.endswith("-")
    assert adapted.endswith("logits (prefill)")
    assert fault.startswith(
        f"a: the first site that differs is {Q1} (rank 4, scale 2, A [32, 4], B [4, 32]): its delta"
    )
    (_, row) = json.loads((tmp_path / "kept" / "report.json").read_text())["rows"]
    assert (row["same"], row["site"]["path"], row["site"]["rank"]) == (False, Q1, 4)


def test_a_row_names_the_first_output_out_of_tolerance_and_keeps_nan() -> None:
    good = OutputDifference("logits", 0, 1e-6, 1e-7, within=True)
    names = ("present.0.key", "logits")
    bad = [OutputDifference(name, 1, 0.5, 0.25, within=False) for name in names]
    row = row_of("a", "b", "x", [good, *bad])
    assert (row.first_out_of_tolerance, row.largest) == ("present.0.key (decode)", 0.5)
    assert not row.same
    shapes = OutputDifference("logits", 0, float("nan"), float("nan"), within=False)
    assert np.isnan(row_of("a", "b", "x", [good, shapes]).largest)


def test_an_output_that_one_side_lacks_is_not_passed_over() -> None:
    errors = [OutputDifference("logits", step, 0.0, 0.0, within=True) for step in range(2)]
    check_complete(Accuracy(("a", "b"), errors), ["logits"])
    with pytest.raises(BackendError, match=r"2 of 4 outputs were not compared: k \(prefill\)"):
        check_complete(Accuracy(("a", "b"), errors), ["logits", "k"])
    with pytest.raises(BackendError, match=r"logits \(decode\); a and b returned different ones"):
        check_complete(Accuracy(("a", "b"), errors[:1]), ["logits"])
    with pytest.raises(BackendError, match="2 of 2 outputs were not compared"):
        check_complete(Accuracy(("a", "b"), []), ["logits"])


@pytest.mark.slow
def test_an_adapter_that_changes_nothing_proves_nothing_and_exits_with_1(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "a" / "adapter_model.safetensors"
    shutil.copytree(tiny_engine.adapter, weights.parent)
    tensors = load_file(weights)
    save_file({n: t * 0 if "lora_B" in n else t for n, t in tensors.items()}, weights)
    config = weights.parent / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": "some/base"}
    config.write_text(json.dumps(fields))
    kept = ("--keep", tmp_path / "kept")
    assert compare(tiny_engine.engine, "--adapter", f"a={weights.parent}", *kept) == 1
    printed = capsys.readouterr().err.splitlines()
    assert "error: a changes no output, so that nothing was compared" in printed
    assert sum("names 'some/base' as its base model" in line for line in printed) == 1


def test_a_runner_is_named_with_its_version_and_device(tiny_engine: TinyEngine) -> None:
    manifest = read_manifest(tiny_engine.engine)
    assert runner_text("onnxrt-runner-N0-11/21/26-22:42:15", manifest) == ONNXRT
    assert runner_text("transformers 5 (CPU, float32)", manifest) == "transformers 5 (CPU, float32)"


def test_a_runner_on_a_gpu_is_named_with_the_flavour(tiny_engine: TinyEngine) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    manifest = replace(read_manifest(tiny_engine.engine), flavour=TENSORRT_RTX.name)
    name = f"tensorrt-rtx {trt.__version__}"
    assert runner_text("trt-runner-N0-1", manifest) == f"{name} (GPU)"
    assert runner_text("trt-lora-runner-N0-1", manifest) == f"{name} with the LoRA plugin (GPU)"


def test_on_a_gpu_the_native_plan_is_compared_with_the_plugin() -> None:
    reference = NativePlan(TENSORRT_RTX.name)
    (command,) = reference.commands(ComparisonCase("a"))
    assert reference.engine_runner == "--trt-lora"
    assert command.text() == (
        'POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run "$ENGINE/model.onnx" --trt '
        "--load-inputs inputs/a --lora-use none --save-outputs outputs/a/native.json"
    )


def test_a_command_is_quoted_for_a_shell_and_filled_in_for_this_machine() -> None:
    command = Command(("python", "-m", "x", "$ENGINE/model.onnx", "a b"))
    assert command.text() == "python -m x \"$ENGINE/model.onnx\" 'a b'"
    argv = command.argv({"ENGINE": Path("/e f")})
    assert argv == [sys.executable, "-m", "x", "/e f/model.onnx", "a b"]


# --------------------------------------------------------------------------------------- bad input


def refused(
    capsys: pytest.CaptureFixture[str], engine: Path, *options: str | Path, keep: Path | None = None
) -> str:
    """Check that it exits with 2, prints one message and leaves nothing behind; return it."""
    folder = keep or engine.parent / "refused"
    assert compare(engine, *options, "--keep", folder) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert keep is not None or not folder.exists()
    return printed.err.removeprefix("error: ").strip()


def test_an_adapter_that_does_not_fit_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny_engine.engine
    assert "adapters/none" in refused(capsys, engine, "--adapter", "a=adapters/none")
    wide = save_model("Llama", tmp_path / "wide", hidden_size=64)
    other = save_adapter(wide, tmp_path / "other", r=4, target_modules=["q_proj"])
    message = refused(capsys, engine, "--adapter", f"a={other}")
    assert "was trained on another base model" in message
    assert "expected NAME=PATH" in refused(capsys, engine, "--adapter", str(other))
    for name in ("base", "a/b", ""):
        assert refused(capsys, engine, "--adapter", f"{name}={tiny_engine.adapter}")
    twice = ("--adapter", f"a={tiny_engine.adapter}") * 2
    assert "a name of its own" in refused(capsys, engine, *twice)


@pytest.mark.parametrize("tolerance", ["inf", "nan", "-1"])
def test_a_tolerance_that_proves_nothing_is_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str], tolerance: str
) -> None:
    message = refused(capsys, tiny_engine.engine, f"--tolerance={tolerance}")
    assert message.endswith("expected a finite number from 0")


def test_an_engine_is_not_compared_with_itself(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tiny_engine.engine)
    message = refused(capsys, tiny_engine.engine, "--against", tmp_path / "link")
    assert "is the engine itself, which always agrees" in message


def test_a_prompt_that_does_not_fit_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, tiny_engine.engine, "--prompt", "Name a fruit.")
    assert "has no tokenizer.json" in message
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    engine = copy_of(tiny_engine.engine, tmp_path / "engine")
    tokenizer = Tokenizer(WordLevel({"a": 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(engine / "tokenizer.json"))
    message = refused(capsys, engine, "--prompt", "a " * 33)
    assert message.startswith("input_ids would be [1, 33] in prefill; this engine takes")


def test_what_it_cannot_be_compared_with_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, model = tiny_engine.engine, tiny_engine.model
    assert "merged, native, peft" in refused(capsys, engine, "--against", "merge")
    assert "--model is missing" in refused(capsys, engine, "--against", "peft")
    assert "--model is for --against peft" in refused(capsys, engine, "--model", model)
    assert "which is not a directory" in refused(
        capsys, engine, "--against", "peft", "--model", tmp_path / "none"
    )
    wide = save_model("Llama", tmp_path / "wide", hidden_size=64)
    message = refused(capsys, engine, "--against", "peft", "--model", wide)
    assert "is not what the engine was built from" in message

    other = copy_of(engine, tmp_path / "other")
    manifest = read_manifest(other)
    base = replace(manifest.base_model, name="another", fingerprint="0")
    (other / MANIFEST_FILE).write_text(replace(manifest, base_model=base).to_json())
    assert "is built from another" in refused(capsys, engine, "--against", other)
    (other / MANIFEST_FILE).write_text(replace(manifest, dtype="bfloat16").to_json())
    assert "is a bfloat16 engine" in refused(capsys, engine, "--against", other)


def test_an_engine_that_cannot_be_compared_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").mkdir()
    plain = engine_without_lora(tiny_engine.engine, tmp_path / "plain")
    assert "has no LoRA inputs" in refused(capsys, plain)
    assert "is not an engine directory" in refused(capsys, tiny_engine.model)
    (plain / ONNX_FILE).unlink()
    assert "has no model.onnx" in refused(capsys, plain)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    message = refused(capsys, tiny_engine.engine, keep=tmp_path / "full")
    assert "is not empty" in message


def test_polygraphy_that_is_missing_or_too_old_is_refused(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.49.26")
    message = refused(capsys, tiny_engine.engine)
    assert message.startswith("polygraphy is 0.49.26, compare needs 0.53.6 or later; pip install")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refused(capsys, tiny_engine.engine)
    assert message.startswith("compare needs polygraphy, which is not installed; pip install")


@pytest.mark.slow
def test_a_command_that_fails_is_named_with_its_reason(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copy_of(tiny_engine.engine, tmp_path / "broken")
    (broken / ONNX_FILE).write_bytes(b"\xff" * 100)
    keep = tmp_path / "kept"
    assert compare(broken, "--against", tiny_engine.engine, "--keep", keep) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    assert str(keep / "logs" / "base.txt") in message
    assert 'polygraphy run "$ENGINE/model.onnx"' in message
