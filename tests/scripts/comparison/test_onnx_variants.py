"""Every variant of an engine's ONNX file computes what the engine does."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.runtime.manifest import ONNX_FILE, read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.comparison.files import save_inputs
from trt_lora.scripts.comparison.onnx_variants import write_model
from trt_lora.scripts.verification.example_inputs import InputSpec, make_inputs


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


@pytest.fixture(scope="module", params=["Llama", "GPT2", "Phi3"])
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Residuals, gates, tied embeddings; Gemm with a bias; fused linears. Inputs are beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder / "model", tie_word_embeddings=True)
    adapter = save_adapter(model, folder / "adapter", r=4)
    quick_build(tiny_config(model, folder / "engine"))
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


@pytest.mark.slow
def test_a_variant_takes_as_much_cache_as_a_step_needs(any_engine: Path, tmp_path: Path) -> None:
    write_model("engine", any_engine, tmp_path / "a.onnx")
    manifest = read_manifest(any_engine)
    whole = make_inputs(any_engine, manifest, InputSpec())
    short = make_inputs(any_engine, manifest, InputSpec(whole_cache=False))
    assert [step["cache.0.key"].shape[2] for step in (*whole, *short)] == [64, 64, 16, 17]
    for step, less in zip(whole, short, strict=True):
        ours = outputs_of(any_engine / ONNX_FILE, step)["logits"]
        theirs = outputs_of(tmp_path / "a.onnx", less)["logits"]
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
