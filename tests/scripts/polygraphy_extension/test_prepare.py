"""The script that polygraphy writes for a command with LoRA options."""

from pathlib import Path

import pytest
from polygraphy.exception import PolygraphyException
from polygraphy.tools._main import main
from support.polygraphy_command import POLYGRAPHY_WARNINGS
from support.polygraphy_subject import Subject

from trt_lora.scripts.polygraphy_extension import prepare as polygraphy_setup
from trt_lora.scripts.polygraphy_extension.data_loader import LoraInputs
from trt_lora.scripts.verification.tolerances import TOLERANCES

pytestmark = POLYGRAPHY_WARNINGS


def generated(folder: Path, *arguments: str | Path) -> str:
    """Return the script that polygraphy writes for `polygraphy run ARGUMENTS`."""
    options = [str(argument) for argument in arguments]
    assert main(["run", *options, "--gen-script", str(folder / "script.py")]) == 0
    return (folder / "script.py").read_text()


def test_on_a_gpu_tensorrt_stays_with_one_profile_for_all_steps(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polygraphy_setup, "cuda_obstacle", lambda: "")
    text = generated(
        tmp_path, subject.model, "--trt", "--trt-lora", "--onnxrt", "--lora-use", "none"
    )
    assert "strongly_typed=True" in text
    assert "'input_ids', min=(1, 1), opt=(1, 32), max=(2, 32)" in text
    assert "'bound', min=(1,), opt=(32,), max=(64,)" in text
    assert f"LoraTensorRTRunner('{subject.engine}')" in text
    assert "LoraReferenceRunner" not in text
    assert "_lora'" not in text  # no outputs that undo fusions
    order = [
        text.index(runner) for runner in ("TrtRunner(d", "LoraTensorRTRunner('", "OnnxrtRunner(")
    ]
    assert order == sorted(order)


def test_polygraphys_own_options_win(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polygraphy_setup, "cuda_obstacle", lambda: "")
    text = generated(
        tmp_path, subject.model, "--trt", "--lora-use", "none", "--trt-min-shapes",
        "input_ids:[1,3]", "--rtol", "0.25",
    )  # fmt: skip
    assert "max=(2, 32)" not in text
    assert "rtol={'': 0.25}" in text
    assert "atol" not in text
    text = generated(tmp_path, subject.model, "--lora-float64", "--onnx-outputs", "logits")
    assert "outputs=['logits']" in text


def test_shapes_of_tokens_are_polygraphys_option(subject: Subject, tmp_path: Path) -> None:
    text = generated(
        tmp_path, subject.model, "--onnxrt", *subject.adapters, "--lora-use", "b",
        "--input-shapes", "input_ids:[1,5]", "--seed", "3", "--iterations", "4",
    )  # fmt: skip
    assert f"adapter='{subject.b}', shape=(1, 5), seed=3, iterations=4)" in text


def test_without_a_lora_option_nothing_changes(subject: Subject, tmp_path: Path) -> None:
    text = generated(tmp_path, subject.model, "--onnxrt")
    assert "trt_lora" not in text
    assert "atol" not in text


def test_every_dtype_has_a_tolerance_and_sums_are_judged_by_their_mean(
    subject: Subject, tmp_path: Path
) -> None:
    text = generated(tmp_path, subject.model, "--onnxrt", "--lora-float64")
    assert "check_error_stat={'': 'elemwise', 'linear_3_lora': 'mean'" in text
    assert set(TOLERANCES) == {"float32", "float16", "bfloat16"}


def test_a_loader_has_a_length_and_steps_by_number(subject: Subject, tmp_path: Path) -> None:
    loader = LoraInputs(str(subject.engine), iterations=3)
    assert len(loader) == len(list(loader)) == 3
    assert loader[2]["input_ids"].shape == (2, 16)
    with pytest.raises(PolygraphyException, match="does not exist"):
        LoraInputs(str(subject.engine), adapter=str(tmp_path / "nowhere"))
