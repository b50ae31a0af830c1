"""The first site that differs is the one with the fault, whatever differs behind it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.fakes.planted_faults import copy_of, cross_wires, scale_weight
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.runtime.adapters.fitting.coverage import SiteCoverage
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.comparison.bisect import SiteFault, first_fault
from trt_lora.scripts.comparison.files import save_inputs
from trt_lora.scripts.comparison.onnx_variants import write_model
from trt_lora.scripts.verification.example_inputs import InputSpec, make_inputs

LIMIT = 1e-4
LAYER = "model.layers.{}.{}"
# A site of every form: of three deltas, before a residual, of two deltas, and the last of a layer;
# and another that reads as many inputs and returns as many outputs.
SITES = {
    "self_attn.q_proj": "self_attn.o_proj",
    "self_attn.v_proj": "self_attn.k_proj",
    "self_attn.o_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
    "mlp.down_proj": "self_attn.q_proj",
}


@dataclasses.dataclass(frozen=True)
class Made:
    """An engine with LoRA on all linears of four layers, and steps of inputs of one adapter."""

    engine: Path
    adapter: Path
    inputs: Path  # the steps, as polygraphy reads them
    steps: list[dict[str, Any]]
    sites: tuple[SiteCoverage, ...]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("bisect")
    model = save_model("Llama", folder / "model", num_hidden_layers=4, num_key_value_heads=4)
    adapter = save_adapter(model, folder / "adapter", r=4, lora_alpha=12)
    manifest = quick_build(tiny_config(model, folder / "engine"))
    steps = make_inputs(folder / "engine", manifest, InputSpec(adapter))
    save_inputs(steps, folder / "inputs")
    sites = fit_adapter(load_adapter(adapter, manifest), manifest).coverage.sites
    return Made(folder / "engine", adapter, folder / "inputs", steps, sites)


def tensors(made: Made, kind: str, engine: Path, onnx: Path) -> list[dict[str, Array]]:
    """What the sites of a variant of an engine read and return, in every step."""
    write_model(kind, engine, onnx, made.inputs, sites=True)
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs() if v.name.startswith("model.")]
    taken = [value.name for value in session.get_inputs()]
    found = []
    for step in made.steps:
        arrays = map(np.asarray, session.run(names, {name: step[name] for name in taken}))
        found.append(dict(zip(names, arrays, strict=True)))
    return found


def fault_of(
    made: Made, ours: list[dict[str, Array]], theirs: list[dict[str, Array]]
) -> SiteFault | None:
    return first_fault(ours, theirs, read_manifest(made.engine), made.sites, LIMIT)


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong(made: Made, tmp_path: Path) -> None:
    ours = tensors(made, "engine", made.engine, tmp_path / "a" / "a.onnx")
    for kind in ("merged", "float64"):
        theirs = tensors(made, kind, made.engine, tmp_path / "a" / f"{kind}.onnx")
        assert {n.rsplit(".", 1)[1] for n in theirs[0]} >= {"x", "y"}
        assert fault_of(made, ours, theirs) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("kind", ["merged", "engine"])
def test_a_site_with_another_ones_b_is_named(
    made: Made, tmp_path: Path, name: str, kind: str
) -> None:
    path, other = LAYER.format(1, name), LAYER.format(1, SITES[name])
    wrong = copy_of(made.engine, tmp_path / "wrong")
    cross_wires(wrong, path, other)
    ours = tensors(made, "engine", wrong, tmp_path / "ours" / "a.onnx")
    theirs = tensors(made, kind, made.engine, tmp_path / "theirs" / "a.onnx")
    later = LAYER.format(2, "self_attn.q_proj.y")
    assert not np.allclose(ours[0][later], theirs[0][later], rtol=1e-3)
    found = fault_of(made, ours, theirs)
    assert found is not None
    assert (found.path, found.rank, found.scales) == (path, 4, (3.0,))
    assert found.cause == "its delta differs"
    assert found.input_error < LIMIT < found.output_error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_wrong_weight_of_another_build_is_told_from_a_wrong_delta(
    made: Made, tmp_path: Path, name: str
) -> None:
    path = LAYER.format(2, name)
    wrong = copy_of(made.engine, tmp_path / "wrong")
    scale_weight(wrong, path, 1.01)
    ours = tensors(made, "engine", made.engine, tmp_path / "ours" / "a.onnx")
    theirs = tensors(made, "engine", wrong, tmp_path / "theirs" / "a.onnx")
    found = fault_of(made, ours, theirs)
    assert found is not None
    assert (found.path, found.cause) == (path, "its delta agrees, its linear or bias differs")


@pytest.mark.slow
def test_a_fault_between_sites_is_told_from_one_in_a_site(made: Made, tmp_path: Path) -> None:
    ours = tensors(made, "engine", made.engine, tmp_path / "a" / "a.onnx")
    name = LAYER.format(1, "mlp.gate_proj")
    theirs = [{**step, f"{name}.x": step[f"{name}.x"] + 1} for step in ours]
    found = fault_of(made, ours, theirs)
    assert found is not None
    assert found.path == name
    assert found.cause.endswith(f"so the fault lies after {LAYER.format(1, 'self_attn.o_proj')}, "
                                "in no LoRA site")  # fmt: skip
    first = next(iter(ours[0])).removesuffix(".x")
    theirs = [{**step, f"{first}.x": step[f"{first}.x"] * np.nan} for step in ours]
    found = fault_of(made, ours, theirs)
    assert found is not None
    assert "before every site" in found.cause


def test_what_rounding_takes_from_a_small_delta_beside_a_large_residual_is_no_fault() -> None:
    residual, y = np.float32(1e4), np.float32(1e-3)
    step = {"s.x": np.ones(1), "s.y": np.array([y]), "s.residual": np.array([residual])}
    rounded = {**step, "s.y": np.array([(residual + y) - residual])}
    wrong = {**step, "s.y": np.array([1.0])}
    manifest = _manifest_of("s")
    assert first_fault([step], [rounded], manifest, (), LIMIT) is None
    found = first_fault([step], [wrong], manifest, (), LIMIT)
    assert found is not None
    assert (found.rank, found.scales) == (1, ())


def _manifest_of(path: str) -> Any:
    from trt_lora.plugins.contract.sites import Site
    from trt_lora.scripts.bench.llama import llama_manifest

    return dataclasses.replace(llama_manifest("float32"), sites=(Site(path, 1, 1, "float32"),))
