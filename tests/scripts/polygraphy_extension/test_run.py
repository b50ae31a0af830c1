"""The extension of `polygraphy run`, on a tiny engine and through polygraphy's own command."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import polygraphy as polygraphy_package
import pytest
from conftest import TinyEngine
from polygraphy.exception import PolygraphyException
from polygraphy.json import load_json
from polygraphy.tools._main import main
from support.doc_blocks import ROOT
from support.fake_cuda import FakeCuda
from support.fake_tensorrt import FakeTensorRT, engine_directory, tiny_model
from support.polygraphy_command import polygraphy, script
from support.tiny_models import save_adapter, save_model, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers

from trt_lora.builder import build_engine
from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.contract.operators import OPERATORS, Operator
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import MANIFEST_FILE, PLAN_FILE
from trt_lora.scripts.polygraphy_extension import prepare as polygraphy_setup
from trt_lora.scripts.polygraphy_extension import tensorrt_runner as polygraphy_tensorrt
from trt_lora.scripts.polygraphy_extension.data_loader import LoraInputs
from trt_lora.scripts.polygraphy_extension.float64_runner import lora_float64
from trt_lora.scripts.polygraphy_extension.outputs import TOLERANCES
from trt_lora.scripts.polygraphy_extension.tensorrt_runner import (
    LoraTensorRTRunner,
    engine_with_plugin,
)
from trt_lora.scripts.verification.example_inputs import Feed, make_inputs

pytestmark = [  # polygraphy asks Python 3.11 for extensions in an old way, and closes no script
    pytest.mark.filterwarnings("ignore:SelectableGroups dict:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

WORDS = ("[UNK]", "name", "a", "fruit")
CANNOT = "runs instead"
OTHER_BASE = {"base_model_name_or_path": "some/base"}


@dataclass(frozen=True)
class Subject:
    """A tiny engine with a tokenizer, and two adapters."""

    engine: Path
    a: Path
    b: Path

    @property
    def model(self) -> Path:
        """Its ONNX file."""
        return self.engine / "model.onnx"

    @property
    def adapters(self) -> list[str]:
        """Both, as options."""
        return ["--lora-adapter", f"a={self.a}", "--lora-adapter", f"b={self.b}"]


@pytest.fixture(scope="module")
def subject(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A copy of the tiny engine, on all linears, and its adapters."""
    folder = tmp_path_factory.mktemp("polygraphy")
    engine = folder / "engine"
    build_engine(tiny_config(tiny_engine.model, engine))
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(engine / "tokenizer.json"))
    b = save_adapter(tiny_engine.model, folder / "b", r=8, seed=1)
    return Subject(engine, tiny_engine.adapter, b)


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


# ------------------------------------------------------------------------------- the real command


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
    expected = make_inputs(subject.engine, manifest, Feed(subject.a, seed=7, iterations=3))
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
    assert decode["attention_mask"].shape == (1, 4)
    lora = [value for name, value in prefill.items() if name.startswith("lora_")]
    assert all(min(value.shape) == 1 and not value.any() for value in lora)


@pytest.mark.slow
def test_the_data_loader_script_needs_no_extension(subject: Subject, tmp_path: Path) -> None:
    path, inputs, outputs = ROOT / "scripts" / "polygraphy_data.py", tmp_path / "in.json", tmp_path
    done = polygraphy(
        "run", subject.model, "--onnxrt", "--data-loader-script", path,
        "--save-outputs", outputs / "out.json",
    )  # fmt: skip
    assert "PASSED" in done.text
    assert "lora" not in str(done.lines("runner")[0])
    script(path, subject.engine, inputs, "--adapter", subject.a, "--seed", "5")
    step = load_json(str(inputs))[1]
    expected = make_inputs(subject.engine, read_manifest(subject.engine), Feed(subject.a, seed=5))[
        1
    ]
    assert all(np.array_equal(step[name], expected[name]) for name in expected)


# --------------------------------------------------------------------------------- what is refused


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
        (["--lora-use", "a", "--lora-adapter", "c=/nowhere"], "/nowhere does not exist"),
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
    assert "polygraphy is 0.49.9; the LoRA options need 0.53.6 or later" in message


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


# ----------------------------------------------------------------------- what becomes of a command


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
    assert "'attention_mask', min=(1, 1), opt=(1, 32), max=(2, 64)" in text
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


def test_a_loader_has_a_length_and_steps_by_number(subject: Subject) -> None:
    loader = LoraInputs(str(subject.engine), iterations=3)
    assert len(loader) == len(list(loader)) == 3
    assert loader[2]["input_ids"].shape == (2, 16)
    with pytest.raises(PolygraphyException, match="does not exist"):
        LoraInputs(str(subject.engine), adapter="/nowhere")


# ----------------------------------------------------------------------------------------- runners


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_reference_is_the_definition_rounded_once(operator: Operator, dtype: str) -> None:
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal((2, 3, 5)).astype(dtype)]
    expected = []
    for site in range(operator.sites):
        operands += [rng.standard_normal((5, site + 1)), rng.standard_normal((site + 1, 4))]
    for site in range(operator.sites):
        a, b = (operands[i].astype(dtype).astype("f8") for i in operator.factors(site))
        expected.append(np.einsum("bsk,kr,rn->bsn", operands[0].astype("f8"), a, b))
        if operator.has_addend:
            operands.append(rng.standard_normal((2, 3, 4)))
            expected[-1] += operands[-1].astype(dtype).astype("f8")
    found = lora_float64(operator, *(operand.astype(dtype) for operand in operands))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        ulp = np.abs(np.spacing(other.astype(dtype))).astype("f8")
        assert np.all(np.abs(one.astype("f8") - other) <= 0.51 * ulp)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    """A GPU with TensorRT-RTX that runs one tiny model."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    trt = FakeTensorRT(cuda)
    trt.install(monkeypatch)
    return trt


def test_the_plan_runs_as_users_run_it(
    gpu: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polygraphy_tensorrt, "engine_with_plugin", contextlib.nullcontext)
    directory = engine_directory(tmp_path / "engine")
    steps = make_inputs(directory, read_manifest(directory), Feed(shape=(2, 3)))
    with LoraTensorRTRunner(str(directory)) as runner:
        metadata = runner.get_input_metadata(use_numpy_dtypes=False)
        for step in steps:  # of two profiles
            found: Mapping[str, np.ndarray] = runner.infer(step)
            for name, expected in tiny_model(step).items():
                np.testing.assert_allclose(found[name], expected, rtol=1e-6)
            assert runner.inference_time
    assert list(metadata) == list(steps[0])
    assert list(metadata["input_ids"].shape) == [None, None]
    assert not list(gpu.contexts)  # all released


def test_a_plan_that_does_not_load_is_one_message(
    gpu: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polygraphy_tensorrt, "engine_with_plugin", contextlib.nullcontext)
    with pytest.raises(PolygraphyException, match="is not an engine directory"):
        LoraTensorRTRunner(str(tmp_path)).activate()


@pytest.mark.slow
def test_a_plan_with_the_plugin_is_built_where_there_is_none(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    made: list[Compiler] = []

    def compiler(*args: Any, **options: Any) -> Compiler:
        made.append(Compiler(*args, **options))
        return made[-1]

    monkeypatch.setattr(polygraphy_tensorrt, "Compiler", compiler)
    with engine_with_plugin(subject.engine) as directory:
        manifest = read_manifest(directory)
        assert (manifest.flavour, manifest.lora_plugin) == ("tensorrt-rtx", "plugin")
        assert (directory / PLAN_FILE).stat().st_size > 0
    assert [found.lora_plugin for found in made] == ["plugin"]
    assert not directory.exists()
    assert not (subject.engine / PLAN_FILE).exists()


def test_a_plan_with_the_plugin_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = engine_directory(tmp_path / "engine")
    manifest = replace(read_manifest(directory), lora_plugin="plugin")
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    with engine_with_plugin(directory) as found:
        assert found == directory
