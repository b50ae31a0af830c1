"""Denoisers and text encoders of diffusers' pipelines as engines, against diffusers and PEFT."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.export.component_calls import COMPONENTS, ComponentCall, component_call
from trt_lora.builder.graphs import component_folder
from trt_lora.builder.graphs.component_folder import is_component
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.bench.diffusion.small_components import MODELS
from trt_lora.scripts.terminal.build_options import build_config, build_parser

pytestmark = [
    pytest.mark.slow,
    # Of PEFT's call of transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

RANK = 4
CLOSE = 2e-6  # of the largest value


@dataclass(frozen=True)
class Built:
    """A component in torch, its engine, and an adapter on all that all-linear means."""

    model: Any  # with PEFT's adapter
    call: ComponentCall
    engine: Engine
    paths: frozenset[str]  # of what the adapter is on

    def inputs(self, times: int) -> dict[str, Tensor]:
        """Inputs with the examples' sizes, all that vary but the batch so many times as large."""
        generator = torch.Generator().manual_seed(times)
        found = {}
        for name, example in self.call.inputs.items():
            shape = [
                size * times if axis in self.call.sizes[name] and (axis or size > 2) else size
                for axis, size in enumerate(example.shape)
            ]
            if example.dtype == torch.long:
                most = 2 if name.endswith("mask") else 1000
                found[name] = torch.randint(0, most, shape, generator=generator)
                continue
            factor = {"timestep": 981.0, "guidance": 3.5}.get(name, 1.0)
            if name == "timestep" and {"img_ids", "img_rope"} & {*self.call.inputs}:
                factor = 1.0  # Flux and Qwen-Image multiply it themselves
            values = torch.rand(shape, generator=generator) + (0 if factor == 1 else 0.5)
            if name.endswith("rope"):
                values = torch.stack((values[..., 0].cos(), values[..., 0].sin()), dim=-1)
            found[name] = (values * factor).to(example.dtype)
        return found

    def expected(self, inputs: Mapping[str, Tensor], *, adapter: bool) -> list[Array]:
        """What diffusers makes of them, with PEFT's adapter or without."""
        with torch.no_grad():
            if adapter:
                found = self.call.run(**inputs)
            else:
                with self.model.disable_adapter():
                    found = self.call.run(**inputs)
        return [each.numpy() for each in (found if isinstance(found, tuple) else (found,))]


@pytest.fixture(scope="module", params=MODELS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("component")
    base = MODELS[request.param]().eval()
    base.save_pretrained(folder / "unet")
    options = ["--lora-target-modules", "all-linear", "--max-lora-rank", str(RANK)]
    command = ["--model", str(folder / "unet"), "--output", str(folder / "engine"), *options]
    config = build_config(
        build_parser().parse_args([*command, "--dtype", "float32", "--flavour", "none"])
    )
    build_engine(config)
    call = component_call(base)
    paths = frozenset(adapted(base))
    lora = LoraConfig(r=RANK, lora_alpha=6, target_modules=[*paths])
    model: Any = get_peft_model(base, lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    model.save_pretrained(str(folder / "adapter"))
    with open_engine(folder / "engine") as engine:
        engine.adapters.load("own", folder / "adapter")
        yield Built(model.eval(), call, engine, paths)


def adapted(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the linears and of the convolutions without a kernel."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or getattr(module, "kernel_size", None) == (1, 1):
            yield path


def test_it_is_diffusers_with_and_without_pefts_adapter_at_any_size(built: Built) -> None:
    manifest = built.engine.manifest
    sites = {site.path for site in manifest.sites}
    assert len(sites) == len(built.engine.adapters.get_coverage("own").adapted)
    assert sites | {*manifest.no_effect} == built.paths
    for times in (1, 2):
        inputs = built.inputs(times)
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        outputs = {}
        for adapter in (None, "own"):
            expected = built.expected(inputs, adapter=adapter is not None)
            outputs[adapter] = built.engine.run(arrays, adapter=adapter)
            for want, found in zip(expected, outputs[adapter].values(), strict=True):
                assert np.abs(want - found).max() <= CLOSE * np.abs(want).max()
        for base, own in zip(outputs[None].values(), outputs["own"].values(), strict=True):
            assert np.abs(base - own).max() > 1e-3, "the adapter moves every output"


def test_every_input_counts(built: Built) -> None:
    """Torch runs the same call: what that dropped would be missing on both sides."""
    inputs = {name: tensor.numpy() for name, tensor in built.inputs(1).items()}
    outputs = built.engine.run(inputs)
    for name, array in inputs.items():
        others = built.engine.run(inputs | {name: np.roll(array, 1)})
        assert any(not np.array_equal(outputs[each], others[each]) for each in outputs), name


def test_folders_of_transformers_are_told_by_the_classes_that_are_traced() -> None:
    own = {name for name in COMPONENTS if hasattr(transformers, name)}
    assert own == {*component_folder._OF_TRANSFORMERS}


def test_a_pipeline_is_no_component(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "unet": [], "vae": []}')
    config = GraphConfig(tmp_path, tmp_path / "engine", ("all-linear",), flavour="none")
    with pytest.raises(ConfigError, match="is a pipeline, whose engines `build_pipeline` makes"):
        build_engine(config)


def test_qwen_images_tables_in_reals_are_its_complex_ones_to_the_bit() -> None:
    model = MODELS["Qwen-Image"]().eval()
    call = component_call(model)
    inputs = {name: torch.rand_like(x.float()).to(x.dtype) for name, x in call.inputs.items()}
    shapes = [[(1, 3, 4)]]
    tables = model.pos_embed(shapes, max_txt_seq_len=5, device=torch.device("cpu"))
    inputs |= zip(("img_rope", "txt_rope"), map(torch.view_as_real, tables), strict=True)
    with torch.no_grad():
        found: Any = call.run(**inputs)
        own = {name: x for name, x in inputs.items() if not name.endswith("rope")}
        (want,) = model(**own, img_shapes=shapes, return_dict=False)
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SD1.5's UNet", {"num_class_embeds": 3}),
        ("SD1.5's UNet", {"addition_embed_type": "text"}),
        ("SD1.5's UNet", {"cross_attention_dim": (16, 16)}),
        ("Qwen-Image", {"zero_cond_t": True}),
        ("Wan", {"image_dim": 1280}),
    ],
)
def test_a_denoiser_with_inputs_of_another_kind_is_refused(
    name: str, options: dict[str, Any]
) -> None:
    model = MODELS[name]()
    config = SimpleNamespace(**{**model.config, **options})
    stand_in = SimpleNamespace(config=config, dtype=torch.float32)
    with pytest.raises(ModelError, match=f"whose {next(iter(options))} is .* not traced"):
        COMPONENTS[type(model).__name__](stand_in)


def test_a_dtype_that_nothing_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype"):
        GraphConfig(tmp_path, tmp_path / "engine", ("all-linear",), dtype="float8")


@pytest.mark.parametrize("config", ["{", "[]", '{"architectures": ["LlamaForCausalLM"]}'])
def test_another_folder_is_left_to_the_reader_of_language_models(
    config: str, tmp_path: Path
) -> None:
    assert not is_component(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert not is_component(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [("AutoencoderKL", ""), ("ZImageTransformer2DModel", ": it takes lists of pictures.*length")],
)
def test_a_class_that_nothing_knows_how_to_call_is_refused(
    name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    config = GraphConfig(tmp_path, tmp_path / "engine", ("all-linear",), flavour="none")
    with pytest.raises(ModelError, match=f"a {name}, which is not traced{why}; known: CLIP"):
        build_engine(config)
