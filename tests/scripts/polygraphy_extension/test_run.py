"""`polygraphy run` with the extension, on a tiny engine, through polygraphy's own command."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from polygraphy.json import load_json
from support.doc_blocks import ROOT
from support.polygraphy_command import POLYGRAPHY_WARNINGS, polygraphy, script
from support.polygraphy_subject import Subject

from trt_lora.runtime import read_manifest
from trt_lora.scripts.verification.example_inputs import InputSpec, make_inputs

pytestmark = POLYGRAPHY_WARNINGS

CANNOT = "runs instead"


@pytest.fixture(scope="module")
def faulty(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's graph with a fault in what others inline: up_proj gets twice gate_proj's delta.

    It lies in a folder of its own, with its weights and nothing else.
    """
    folder = tmp_path_factory.mktemp("faulty")
    model = onnx.load(subject.model, load_external_data=False)
    (body,) = (found for found in model.functions if found.name == "LoraDelta2")
    gate, up = body.output
    last = next(node for node in body.node if up in node.output)
    last.op_type, last.input[:] = "Add", [gate, gate]
    onnx.save(model, folder / "model.onnx")
    shutil.copyfile(subject.engine / "model.onnx.data", folder / "model.onnx.data")
    return folder / "model.onnx"


@pytest.mark.slow
def test_without_a_gpu_a_fallback_says_so_in_one_line_and_onnx_runtime_meets_float64(
    subject: Subject, tmp_path: Path
) -> None:
    inputs, outputs = tmp_path / "in.json", tmp_path / "out.json"
    done = polygraphy(
        "run", subject.model, "--onnxrt", "--trt-lora", "--trt", *subject.adapters,
        "--lora-use", "a", "--seed", "7", "--iterations", "3", "--validate", "--trt-lora-fallback",
        "--save-inputs", inputs, "--save-outputs", outputs,
    )  # fmt: skip
    (line,) = done.lines(CANNOT)
    assert "--trt-lora and --trt cannot run here" in line
    assert "Passed: 3/3 iterations" in done.text
    manifest = read_manifest(subject.engine)
    expected = make_inputs(subject.engine, manifest, InputSpec(subject.a, seed=7, iterations=3))
    saved = load_json(str(inputs))
    assert len(saved) == 3
    for step, wanted in zip(saved, expected, strict=True):
        assert step.keys() == wanted.keys()
        assert all(np.array_equal(step[name], wanted[name]) for name in wanted)
    runners = list(load_json(str(outputs)).items())
    assert [name.partition("-runner")[0] for name, _ in runners] == ["onnxrt", "lora-float64"]
    compared = set(runners[0][1][0]) & set(runners[1][1][0])
    assert len([name for name in compared if name.endswith("_lora")]) == len(manifest.sites)
    assert {output.name for output in manifest.outputs} <= compared

    again = polygraphy(
        "run", subject.model, "--onnxrt", *subject.adapters, "--lora-use", "none", "--fail-fast",
        "--load-inputs", inputs, "--load-outputs", outputs,
    )  # fmt: skip
    assert "Accuracy Summary" in again.text


@pytest.mark.parametrize("options", [["--trt-lora"], ["--trt", "--lora-use", "none"]])
@pytest.mark.slow
def test_tensorrt_that_cannot_run_fails_and_names_the_cause_and_the_option(
    subject: Subject, options: list[str]
) -> None:
    done = polygraphy("run", subject.model, "--onnxrt", *options, expected=1)
    (line,) = done.lines("[!]")
    assert line.startswith(f"[!] {options[0]} cannot run here: ")
    assert "add --trt-lora-fallback to run --lora-float64" in line
    assert done.lines("PASSED") == []


@pytest.mark.slow
def test_tensorrt_of_polygraphys_own_without_our_options_fails_too(subject: Subject) -> None:
    done = polygraphy("run", subject.model, "--onnxrt", "--trt", expected=1)
    assert done.lines("PASSED") == []


@pytest.mark.slow
def test_a_fault_in_one_operator_fails_and_polygraphys_tolerances_decide(
    subject: Subject, faulty: Path
) -> None:
    command = (
        "run", faulty, "--onnxrt", "--lora-float64", "--lora-engine", subject.engine, "--fail-fast",
        "--lora-adapter", f"b={subject.b}",
    )  # fmt: skip
    done = polygraphy(*command, expected=1)
    assert len(done.lines("FAILED | Output")) == 1
    polygraphy(*command, "--atol", "1e6", "--rtol", "1e-9")


@pytest.mark.slow
def test_a_prompt_and_a_generated_script(subject: Subject, tmp_path: Path) -> None:
    generated, inputs = tmp_path / "compare.py", tmp_path / "inputs"
    polygraphy(
        "run", subject.model, "--onnxrt", "--lora-float64", *subject.adapters, "--lora-use",
        "none", "--lora-prompt", "name a fruit", "--gen-script", generated,
        "--save-inputs", inputs,
    )  # fmt: skip
    done = script(generated)
    assert "Passed: 2/2 iterations" in done.text
    prefill, decode = (load_json(str(path)) for path in sorted(inputs.iterdir()))
    assert prefill["input_ids"].tolist() == [[1, 2, 3]]
    assert decode["lengths"].tolist() == [3]
    lora = [value for name, value in prefill.items() if name.startswith("lora_")]
    assert all(min(value.shape) == 1 and not value.any() for value in lora)


@pytest.mark.slow
def test_the_data_loader_script_needs_no_extension(subject: Subject, tmp_path: Path) -> None:
    path = ROOT / "scripts" / "polygraphy_extension" / "data_script.py"
    inputs, outputs = tmp_path / "in.json", tmp_path
    done = polygraphy(
        "run", subject.model, "--onnxrt", "--data-loader-script", path,
        "--save-outputs", outputs / "out.json",
    )  # fmt: skip
    assert "PASSED" in done.text
    assert "lora" not in str(done.lines("runner")[0])
    script(path, subject.engine, inputs, "--adapter", subject.a, "--seed", "5")
    step = load_json(str(inputs))[1]
    spec = InputSpec(subject.a, seed=5)
    expected = make_inputs(subject.engine, read_manifest(subject.engine), spec)[1]
    assert all(np.array_equal(step[name], expected[name]) for name in expected)
