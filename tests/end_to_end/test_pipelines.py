"""Engines of a diffusers pipeline, as docs/pipelines.md makes them, against diffusers and PEFT."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.test_components import CLOSE
from support.doc_blocks import blocks
from support.fakes.fake_engine import write_peft
from support.models.tiny_pipelines import activate, save_adapter, save_sdxl
from support.page_checkout import run_in
from support.refusals import refused

from trt_lora.builder import GraphConfig, PipelineConfig, build_pipeline
from trt_lora.builder.build import list_sites
from trt_lora.builder.export.component_calls import component_call
from trt_lora.builder.graphs import write_graph
from trt_lora.builder.graphs.config import ResolvedGraph
from trt_lora.builder.graphs.targets import GraphTargets, check_graph_targets
from trt_lora.builder.pipelines.pipeline_folder import PipelineFolder
from trt_lora.plugins.errors import ConfigError, ModelError, StateError
from trt_lora.runtime import Manifest, PipelineEngines, open_pipeline, read_manifest
from trt_lora.runtime.adapters.fitting.no_effect import NO_EFFECT
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts import build_engine
from trt_lora.scripts.terminal.engine_facts import engine_facts

pytestmark = [
    pytest.mark.slow,
    # Of PEFT's call of transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]

LAST, PEFT = "encoder.layers.1.", ("lora_A", "lora_B")
BUILD, USE = (block for block in blocks("docs/pipelines.md") if block.language)


@dataclass(frozen=True)
class Checkout:
    """A folder with a pipeline, its engines and adapters, and the pipeline's models in torch."""

    folder: Path
    models: Mapping[str, Any]

    def expected(
        self, component: str, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, float]
    ) -> dict[str, Array]:
        """What diffusers makes of a component's inputs, with PEFT's sum of adapters."""
        activate(self.models[component], weights)
        call = component_call(self.models[component])
        with torch.no_grad():
            found = call.run(**inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return {n: each.numpy() for n, each in zip(call.outputs, outputs, strict=True)}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("pipeline")
    models = save_sdxl(folder / "build" / "sdxl")
    run_in(folder, BUILD)
    save_adapter(models, folder, "style", rank=4)
    save_adapter(models, folder, "face", rank=2)
    return Checkout(folder, models)


@pytest.fixture
def engines(checkout: Checkout) -> Iterator[PipelineEngines]:
    with open_pipeline(checkout.folder / "engines" / "sdxl") as found:
        for name in ("style", "face"):
            found.adapters.load(name, checkout.folder / f"{name}.safetensors")
        yield found


def test_the_page_shows_what_happens(checkout: Checkout) -> None:
    assert run_in(checkout.folder, USE) == "unet text_encoder text_encoder_2 (1, 77, 16)\n"


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, example in component_call(model).inputs.items():
        if example.dtype == torch.long:
            found[name] = torch.randint(0, 1000, example.shape, generator=generator)
        else:
            scale = 981.0 if name == "timestep" else 1.0
            found[name] = scale * (torch.rand(example.shape, generator=generator) + 0.1)
    return found


WEIGHTS: dict[str, Any] = {"style": 0.7, "face": {"unet": 0.5, "text_encoder_2": -1.0}}


@pytest.mark.parametrize("component", ["unet", "text_encoder", "text_encoder_2"])
def test_every_component_is_diffusers_with_pefts_adapters(
    component: str, checkout: Checkout, engines: PipelineEngines
) -> None:
    engines.adapters.blend("both", WEIGHTS)
    face = WEIGHTS["face"].get(component, 1.0)
    cases: dict[str | None, dict[str, float]] = {
        None: {},
        "style": {"style": 1.0},
        "face": {"face": 1.0},
        "both": {"style": 0.7, "face": face},
    }
    inputs, results = inputs_of(checkout.models[component]), []
    for name, weights in cases.items():
        arrays = {key: tensor.numpy() for key, tensor in inputs.items()}
        found = engines.run(component, arrays, adapter=name)
        expected = checkout.expected(component, inputs, weights)
        for output, array in found.items():
            want = expected[output.removesuffix("_1")]  # an input of the UNet is called sample
            assert np.abs(want - array).max() <= CLOSE * max(1, np.abs(want).max())
        results.append(next(iter(found.values())))
    base, *others = (np.abs(results[0] - each).max() for each in results)
    assert base == 0
    assert [moved > 1e-3 for moved in others] == [True, component != "text_encoder", True]


def test_a_text_encoder_returns_what_the_pipeline_reads_and_knows_what_has_no_effect(
    checkout: Checkout, engines: PipelineEngines
) -> None:
    manifests = {name: engine.manifest for name, engine in engines.engines.items()}
    assert {name: each.component for name, each in manifests.items()} == {n: n for n in manifests}
    outputs = {n: [output.name for output in each.outputs] for n, each in manifests.items()}
    assert outputs == {
        "unet": ["sample_1"],
        "text_encoder": ["hidden_state_2"],
        "text_encoder_2": ["hidden_state_2", "pooled"],
    }
    dead = {n: sorted(each.no_effect) for n, each in manifests.items()}
    modules = [name for name, _ in checkout.models["text_encoder"].named_modules()]
    linears = [n for n in modules if n.startswith(LAST) and n.endswith(("_proj", "fc1", "fc2"))]
    assert dead == {"unet": [], "text_encoder": sorted(linears), "text_encoder_2": []}
    assert len(linears) == 6
    facts = engine_facts(checkout.folder, manifests["text_encoder"])
    assert facts["component"] == "text_encoder"
    assert LAST in facts["no effect"]
    coverage = engines.adapters.coverage("style")["text_encoder"]
    idle = {name for name, why in coverage.ignored.items() if why == NO_EFFECT}
    assert len(idle) == 4  # A and B of two linears
    assert all(LAST in name for name in idle)


def test_engines_are_open_together_or_not_at_all(
    checkout: Checkout, engines: PipelineEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = open_pipeline(checkout.folder / "engines" / "sdxl")
    first, second, _ = closed.engines.values()
    monkeypatch.setattr(type(second), "__enter__", _failing(second, type(second).__enter__))
    with refused(ModelError, "planted"), closed:
        pass
    for use in (lambda: closed.adapters, lambda: first.adapters):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert "closed" in repr(closed)
    assert "open" in repr(engines)


def test_a_third_component_that_fails_leaves_every_answer_as_it_was(
    checkout: Checkout, engines: PipelineEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {
        name: {key: tensor.numpy() for key, tensor in inputs_of(model).items()}
        for name, model in checkout.models.items()
    }

    def answers() -> list[bytes]:
        cases = [(c, name) for c in inputs for name in (None, "style", "face")]
        runs = [engines.run(c, inputs[c], adapter=name) for c, name in cases]
        return [array.tobytes() for outputs in runs for array in outputs.values()]

    def fail(*args: object, **kwargs: object) -> None:
        raise StateError("planted")

    before, last = answers(), engines.engines["text_encoder_2"].adapters
    monkeypatch.setattr(last, "load", fail)
    monkeypatch.setattr(last, "blend", fail)
    with refused(StateError, "planted"):
        engines.adapters.load("style", checkout.folder / "face.safetensors", replace=True)
    with refused(StateError, "planted"):
        engines.adapters.blend("style", {"face": 0.5}, replace=True)
    assert answers() == before
    for engine in engines.engines.values():
        engine.adapters.check_integrity()


def _failing(engine: object, enter: Any) -> Any:
    def method(self: object) -> Any:
        if self is engine:
            raise ModelError("planted")
        return enter(self)

    return method


@pytest.mark.parametrize(("kind", "read"), [
    ("StableDiffusionPipeline", [("last_hidden_state",), (), ()]),
    ("StableDiffusionXLImg2ImgPipeline", [("hidden_state_2",), ("hidden_state_2", "pooled"), ()]),
    ("StableDiffusion3Pipeline", [*[("hidden_state_2", "pooled")] * 2, ("last_hidden_state",)]),
    ("FluxPipeline", [("pooled",), ("last_hidden_state",), ()]),
    ("Flux2Pipeline", [(), (), ()]),  # not known: every output is kept
])  # fmt: skip
def test_what_a_pipeline_reads_of_its_text_encoders(kind: str, read: list[Any]) -> None:
    folder = PipelineFolder(Path(), kind, (), ())
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    assert [folder.outputs_read(name) for name in names] == read
    assert folder.outputs_read("unet") == ()


def test_an_adapter_for_modules_without_effect_is_no_reason_not_to_build(
    checkout: Checkout, tmp_path: Path
) -> None:
    paths = ["encoder.layers.0.mlp.fc1", f"{LAST}mlp.fc1"]
    a, b = np.ones((1, 16), np.float32), np.ones((32, 1), np.float32)
    pair = dict(zip(PEFT, (a, b), strict=True))
    tensors = {f"{path}.{factor}": pair[factor] for path in paths for factor in PEFT}
    config = GraphConfig(
        checkout.folder / "build" / "sdxl" / "text_encoder",
        tmp_path / "engine",
        lora_dirs=(write_peft(tmp_path / "a", tensors, target_modules=["fc1"], r=1),),
        dtype="float32",
        outputs=("hidden_state_2",),
    )
    listing = list_sites(config)
    assert [site.path for site in listing.sites] == paths[:1]
    assert [item.path for item in listing.left_alone if item.reason == NO_EFFECT] == paths[1:]
    with refused(ConfigError, "no output depends on what takes LoRA here", paths[1]):
        check_graph_targets(GraphTargets.from_names(paths[1:]), (), (), paths[1:])


def test_a_dry_run_lists_the_sites_of_each_component(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(checkout.folder / "build" / "sdxl")
    words = ["--model", model, "--components", "text_encoder,text_encoder", "--dry-run", "--json"]
    build_engine.main([*words, "--lora-target-modules", "fc1", "--dtype", "float32"])
    (name, listing), *_ = json.loads(capsys.readouterr().out).items()
    assert name == "text_encoder"
    assert [site["path"] for site in listing["sites"]] == ["encoder.layers.0.mlp.fc1"]


REFUSED = {
    "--components unett": "did you mean 'unet'?",
    "--components vae": "it is no component that takes LoRA",
    "--lora-target-modules fc1 to_qq": "did you mean 'to_q'?",
    "--lora-target-modules fc1": "unet has no linear of --lora-target-modules fc1; add one of its "
    "own, or leave it out with --components text_encoder text_encoder_2",
    "--shapes batch=1 height=2 width=2 tokens=5 heigth=8": "did you mean 'height'?",
    "--shapes batch=1:2:4": "height (of unet)",
    "--lora-dir adapter": "--lora-dir is of one graph",
    "--path-prefix a.b": "--path-prefix is of one graph",
    "--quantize int8": "of language models",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_fit_no_component_are_refused_before_a_weight_is_read(
    words: str, checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(checkout.folder / "build" / "sdxl")
    given = ["--model", model, "--output", str(tmp_path / "e"), *words.split()]
    if "--lora-target-modules" not in words:
        given += ["--lora-target-modules", "all-linear"]
    with pytest.raises(SystemExit):
        build_engine.main(given)
    assert REFUSED[words] in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_components_are_of_a_pipeline(checkout: Checkout, capsys: Any) -> None:
    model = str(checkout.folder / "build" / "sdxl" / "unet")
    words = ["--model", model, "--components", "unet", "--lora-target-modules", "all-linear"]
    with pytest.raises(SystemExit):
        build_engine.main(words)
    assert "--components ['unet'] is of a pipeline" in capsys.readouterr().err


def test_a_component_that_fails_leaves_nothing_and_what_stood_there_stays(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(checkout.folder / "engines" / "sdxl" / "unet")
    failing = {"text_encoder"}

    def write(build: ResolvedGraph, work: Path, progress: object) -> Manifest:
        if build.config.component in failing:
            raise ModelError("planted")
        (work / "manifest.json").write_text(manifest.to_json())
        return manifest

    monkeypatch.setattr(write_graph, "write_graph", write)
    graph = GraphConfig(
        checkout.folder / "build" / "sdxl", tmp_path / "e", ("all-linear",), flavour="none"
    )
    with refused(ModelError, "planted"):
        build_pipeline(PipelineConfig(graph))
    assert list(tmp_path.iterdir()) == []
    failing.clear()
    assert build_pipeline(PipelineConfig(graph)).keys() == {*checkout.models}
    found = {path.name for path in (tmp_path / "e").iterdir()}
    assert found == {*checkout.models, "pipeline.json"}
    with refused(ConfigError, "exists", "--force"):
        build_pipeline(PipelineConfig(graph))
    failing.add("text_encoder_2")
    with refused(ModelError, "planted"):
        build_pipeline(PipelineConfig(replace(graph, force=True)))
    assert {path.name for path in (tmp_path / "e").iterdir()} == found
    build_pipeline(PipelineConfig(replace(graph, force=True), ("unet",)))
    assert {path.name for path in (tmp_path / "e").iterdir()} == {"unet", "pipeline.json"}
