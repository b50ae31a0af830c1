"""Denoisers and text encoders of diffusers' pipelines as engines, against diffusers and PEFT."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.export.component_calls import COMPONENTS, ComponentCall, component_call
from trt_lora.builder.graphs.component_folder import is_component
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.terminal.build_options import build_config, build_parser

pytestmark = [
    pytest.mark.slow,
    # Of PEFT's call of transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

DIFFUSERS: Any = diffusers  # whose classes have no types
RANK = 4
CLOSE = 2e-6  # of the largest value
TEXT = 16  # width of what denoisers read of a text
BLOCKS: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": TEXT,
}


def unet(**options: Any) -> Any:
    """SD1.5's blocks: attention by 1x1 convolutions around linears."""
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    blocks = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 2}
    return DIFFUSERS.UNet2DConditionModel(**BLOCKS, **blocks, **options)


def unet_xl() -> Any:
    """SDXL's: linear projections, and the sizes of the picture beside the text."""
    return unet(
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT,
    )


def sd3() -> Any:
    return DIFFUSERS.SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=TEXT, caption_projection_dim=16,
        pooled_projection_dim=TEXT, pos_embed_max_size=16,
    )  # fmt: skip


def flux() -> Any:
    return DIFFUSERS.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=TEXT, pooled_projection_dim=TEXT,
        guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def clip(kind: Any) -> Any:
    config = CLIPTextConfig(
        hidden_size=16, intermediate_size=32, projection_dim=24, num_hidden_layers=2,
        num_attention_heads=2, vocab_size=1000, eos_token_id=999,
    )  # fmt: skip
    return kind(config)


def t5() -> Any:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=1000,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5EncoderModel(config)


MODELS: Mapping[str, Callable[[], Any]] = {
    "SD1.5's UNet": unet,
    "SDXL's UNet": unet_xl,
    "SD3": sd3,
    "Flux": flux,
    "CLIP-L": lambda: clip(CLIPTextModel),
    "CLIP-G": lambda: clip(CLIPTextModelWithProjection),
    "T5": t5,
}


@dataclass(frozen=True)
class Built:
    """A component in torch, its engine, and an adapter on all that all-linear means."""

    model: Any  # with PEFT's adapter
    call: ComponentCall
    engine: Engine

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
                found[name] = torch.randint(0, 1000, shape, generator=generator)
                continue
            factor = {"timestep": 981.0, "guidance": 3.5}.get(name, 1.0)
            if name == "timestep" and "img_ids" in self.call.inputs:
                factor = 1.0  # Flux multiplies it itself
            values = torch.rand(shape, generator=generator) + (0 if factor == 1 else 0.5)
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
    lora = LoraConfig(r=RANK, lora_alpha=6, target_modules=[*adapted(base)])
    model: Any = get_peft_model(base, lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    model.save_pretrained(str(folder / "adapter"))
    with open_engine(folder / "engine") as engine:
        engine.adapters.load("own", folder / "adapter")
        yield Built(model.eval(), call, engine)


def adapted(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the linears and of the convolutions without a kernel."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or getattr(module, "kernel_size", None) == (1, 1):
            yield path


def test_it_is_diffusers_with_and_without_pefts_adapter_at_any_size(built: Built) -> None:
    paths = {site.path for site in built.engine.manifest.sites}
    assert len(paths) == len(built.engine.adapters.get_coverage("own").adapted)
    for times in (1, 2):
        inputs = built.inputs(times)
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        outputs = {}
        for adapter in (None, "own"):
            expected = built.expected(inputs, adapter=adapter is not None)
            outputs[adapter] = built.engine.run(arrays, adapter=adapter)
            for want, found in zip(expected, outputs[adapter].values(), strict=True):
                assert np.abs(want - found).max() <= CLOSE * max(1, np.abs(want).max())
        for base, own in zip(outputs[None].values(), outputs["own"].values(), strict=True):
            assert np.abs(base - own).max() > 1e-3, "the adapter moves every output"


def test_every_input_counts(built: Built) -> None:
    """Torch runs the same call: what that dropped would be missing on both sides."""
    inputs = {name: tensor.numpy() for name, tensor in built.inputs(1).items()}
    outputs = built.engine.run(inputs)
    for name, array in inputs.items():
        others = built.engine.run(inputs | {name: (array * 2 % 997).astype(array.dtype)})
        assert any(not np.array_equal(outputs[each], others[each]) for each in outputs), name


def test_a_pipeline_is_no_component(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "unet": [], "vae": []}')
    config = GraphConfig(tmp_path, tmp_path / "engine", ("all-linear",), flavour="none")
    with pytest.raises(ConfigError, match="is a pipeline, whose engines `build_pipeline` makes"):
        build_engine(config)


@pytest.mark.parametrize(
    "options",
    [{"num_class_embeds": 3}, {"addition_embed_type": "text"}, {"cross_attention_dim": (16, 16)}],
)
def test_a_unet_with_inputs_of_another_kind_is_refused(options: dict[str, Any]) -> None:
    model = SimpleNamespace(config=unet().config, dtype=torch.float32)
    model.config = SimpleNamespace(**{**model.config, **options})
    with pytest.raises(ModelError, match=f"a UNet whose {next(iter(options))} is .* not traced"):
        COMPONENTS["UNet2DConditionModel"](model)


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


def test_a_class_that_nothing_knows_how_to_call_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    config = GraphConfig(tmp_path, tmp_path / "engine", ("all-linear",), flavour="none")
    with pytest.raises(ModelError, match="a AutoencoderKL, which is not traced; known: CLIP"):
        build_engine(config)
