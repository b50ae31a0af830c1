"""What the extension of `polygraphy run` refuses, as one message of polygraphy's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import polygraphy as polygraphy_package
import pytest
from conftest import TinyEngine
from polygraphy.tools._main import main
from support.models.tiny_models import save_adapter, save_model
from support.polygraphy_command import POLYGRAPHY_WARNINGS
from support.polygraphy_subject import Subject

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import MANIFEST_FILE, PLAN_FILE
from trt_lora.scripts.polygraphy_extension.data_loader import LoraInputs

pytestmark = POLYGRAPHY_WARNINGS

OTHER_BASE = {"base_model_name_or_path": "some/base"}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run polygraphy in this process; check its exit status, return its one message."""
    assert main([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr()
    errors = [line for line in (printed.out + printed.err).splitlines() if "[!]" in line]
    (error,) = errors
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-use", "zz"], "--lora-use is 'zz'; choose from: a, b, none"),
        ([], "--lora-use is missing; choose from: a, b, none"),
        (["--lora-use", "a", "--lora-adapter", "c"], "--lora-adapter is 'c', expected NAME=PATH"),
        (["--lora-use", "a", "--lora-adapter", "c=/dev/null/c"], "/dev/null/c does not exist"),
        (["--lora-use", "a", "--lora-adapter", "a=x"], "--lora-adapter has a, b, a; give each"),
        (["--lora-use", "a", "--input-shapes", "input_ids:[1,99]"], "would be [1, 99] in prefill"),
        (["--lora-use", "a", "--input-shapes", "x:[1,9]"], "give input_ids:[batch,tokens] alone"),
        (["--lora-use", "a", "--lora-engine", "/tmp"], "it is not an engine directory"),
        (
            ["--lora-use", "a", "--lora-prompt", "a", "--input-shapes", "input_ids:[1,9]"],
            "leave out --input-shapes",
        ),
        (["--lora-use", "a", "--load-inputs", "x.json"], "with the adapter and the tokens that"),
        (
            ["--lora-use", "none", "--lora-prompt", "a", "--load-inputs", "x.json"],
            "out --lora-prompt and --lora-adapter",
        ),
        (["--lora-use", "a", "--iterations", "0"], "--iterations is 0, expected 1 or more"),
    ],
)
def test_a_wrong_option_is_one_message_and_polygraphys_exit_status(
    subject: Subject, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    given = refusal(capsys, "run", subject.model, "--onnxrt", *subject.adapters, *options)
    assert message in given


@pytest.mark.parametrize("other", ["--lora-float64", "--trt"])
def test_a_fallback_that_leaves_nothing_to_compare_is_refused(
    subject: Subject, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    command = ("run", subject.model, "--trt-lora", other, "--trt-lora-fallback")
    message = refusal(capsys, *command)
    assert "every runner would be --lora-float64, and nothing be compared" in message


def test_a_warning_of_an_adapter_is_a_warning_of_polygraphys(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = Path(shutil.copytree(subject.a, tmp_path / "a"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | OTHER_BASE))
    options = ("--lora-adapter", f"a={adapter}", "--gen-script", "/dev/null")
    assert main(["run", str(subject.model), "--onnxrt", *options]) == 0
    LoraInputs(str(subject.engine), adapter=str(adapter))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "some/base" in line]
    assert line.startswith("[W] ")


def test_an_adapter_of_another_base_is_refused_used_or_not(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_adapter(save_model("Llama", tmp_path / "m", hidden_size=64), tmp_path / "o", r=4)
    options = ("--lora-adapter", f"o={other}", "--lora-use", "none")
    assert "another base model" in refusal(capsys, "run", subject.model, "--onnxrt", *options)


def test_a_prompt_without_a_tokenizer_is_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_engine.engine / "model.onnx"
    assert "has no tokenizer.json" in refusal(
        capsys, "run", model, "--onnxrt", "--lora-prompt", "a"
    )


def test_a_model_without_lora_inputs_is_refused(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = engine_without_lora(subject.engine, tmp_path) / "model.onnx"
    options = ("--lora-use", "none", "--lora-engine", subject.engine)
    assert "has no LoRA inputs" in refusal(capsys, "run", plain, "--onnxrt", *options)
    text = tmp_path / "text.onnx"
    text.write_text("no model")
    assert "is not an ONNX model" in refusal(capsys, "run", text, "--onnxrt", *options)


def test_a_command_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "need a model" in refusal(capsys, "run", "--onnxrt", "--lora-use", "none")


def test_an_old_polygraphy_is_refused(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(polygraphy_package, "__version__", "0.49.9")
    message = refusal(capsys, "run", subject.model, "--onnxrt", "--lora-use", "none")
    assert "polygraphy is 0.49.9, the LoRA extension needs 0.53.6 or later" in message


def test_onnx_runtime_is_not_asked_to_run_bfloat16(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = replace(read_manifest(subject.engine), dtype="bfloat16", files={})
    (tmp_path / MANIFEST_FILE).write_text(manifest.to_json())
    options = ("--lora-use", "none", "--lora-engine", tmp_path)
    message = refusal(capsys, "run", subject.model, "--onnxrt", *options)
    assert "--onnxrt cannot run bfloat16 on a CPU" in message


def test_the_reference_needs_onnx(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / PLAN_FILE
    plan.write_bytes(b"plan")
    options = ("--lora-float64", "--lora-engine", subject.engine)
    assert "--lora-float64 reads ONNX" in refusal(capsys, "run", plan, *options)
