"""Rows, runners and commands of a comparison, without running one."""

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from support.compare_command import ONNXRT

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.scripts.comparison.files import Accuracy, OutputDifference, check_complete
from trt_lora.scripts.comparison.references import ONNX_VARIANTS, ComparisonCase, Reference
from trt_lora.scripts.comparison.report import ComparisonRow, compared_row, runner_text
from trt_lora.scripts.comparison.shell_commands import Command


def row_of(errors: list[OutputDifference], manifest: Manifest) -> ComparisonRow:
    """The row of two runs on ONNX Runtime."""
    runners = ("onnxrt-runner-N0-1", "onnxrt-runner-N1-1")
    reference = Reference("merged", "merged weights", "merged")
    return compared_row(Accuracy(runners, errors), reference, manifest, "x")


def test_a_row_names_the_first_output_out_of_tolerance_and_keeps_nan(
    tiny_engine: TinyEngine,
) -> None:
    manifest = read_manifest(tiny_engine.engine)
    names = [output.name for output in manifest.outputs]
    good = [OutputDifference(n, step, 1e-6, 1e-7, within=True) for step in (0, 1) for n in names]
    bad = [replace(each, largest=0.5, mean=0.25, within=False) for each in good[-2:]]
    row = row_of([*good[:-2], *bad], manifest)
    assert (row.first_out_of_tolerance, row.largest) == (f"{bad[0].name} (decode)", 0.5)
    assert not row.same
    nan = replace(good[0], largest=float("nan"), mean=float("nan"), within=False)
    assert np.isnan(row_of([nan, *good[1:]], manifest).largest)


def test_an_output_that_one_side_lacks_is_not_passed_over() -> None:
    errors = [OutputDifference("logits", step, 0.0, 0.0, within=True) for step in range(2)]
    check_complete(Accuracy(("a", "b"), errors), ["logits"])
    with pytest.raises(BackendError, match=r"2 of 4 outputs were not compared: k \(prefill\)"):
        check_complete(Accuracy(("a", "b"), errors), ["logits", "k"])
    with pytest.raises(BackendError, match=r"logits \(decode\); a and b returned different ones"):
        check_complete(Accuracy(("a", "b"), errors[:1]), ["logits"])
    with pytest.raises(BackendError, match="2 of 2 outputs were not compared"):
        check_complete(Accuracy(("a", "b"), []), ["logits"])


def test_a_runner_is_named_with_its_version_and_device(tiny_engine: TinyEngine) -> None:
    manifest = read_manifest(tiny_engine.engine)
    assert runner_text("onnxrt-runner-N0-11/21/26-22:42:15", manifest) == ONNXRT


def test_a_runner_on_a_gpu_is_named_with_the_flavour(tiny_engine: TinyEngine) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    manifest = replace(read_manifest(tiny_engine.engine), flavour=TENSORRT_RTX.name)
    name = f"tensorrt-rtx {trt.__version__}"
    assert runner_text("trt-runner-N0-1", manifest) == f"{name} (GPU)"
    assert runner_text("trt-lora-runner-N0-1", manifest) == f"{name} with the LoRA plugin (GPU)"


def test_on_a_gpu_the_native_plan_is_compared_with_the_plugin() -> None:
    reference = Reference("native", "a plan", flavour=TENSORRT_RTX.name)
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


def test_the_modules_that_a_comparison_runs_are_there() -> None:
    assert importlib.util.find_spec(f"trt_lora.scripts.{ONNX_VARIANTS}")
