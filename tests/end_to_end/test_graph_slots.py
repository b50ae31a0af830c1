"""Denoisers with many adapters in a batch: each row is diffusers' and PEFT's with its own."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.commands import trt_lora
from torch import Tensor, nn

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.export.component_calls import BATCH, ComponentCall, component_call
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.memory.dtypes import Array

pytestmark = pytest.mark.slow

DIFFUSERS: Any = diffusers  # whose classes have no types
CLOSE = 2e-6  # of the largest value
RANKS = {"ink": 4, "sky": 1, "fog": 3}
ROWS = ("ink", None, "sky", "ink", "fog")
TEXT = 16


def unet(**options: Any) -> Any:
    return DIFFUSERS.UNet2DConditionModel(
        block_out_channels=(16,), layers_per_block=1, norm_num_groups=8, cross_attention_dim=TEXT,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        attention_head_dim=2, **options,
    )  # fmt: skip


def unet_xl() -> Any:
    return unet(
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT,
    )  # fmt: skip


def flux() -> Any:
    return DIFFUSERS.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=TEXT, pooled_projection_dim=TEXT,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


# The model, its targets, and sizes of a plan; none is made where there are none.
MODELS: Mapping[str, tuple[Callable[[], Any], tuple[str, ...], tuple[str, ...]]] = {
    "SD1.5's UNet": (
        unet,
        ("all-linear", "conv"),
        ("batch=1:2:5", "height=2:4:8", "width=2:4:8", "tokens=5"),
    ),
    "SDXL's UNet": (unet_xl, ("all-linear",), ()),
    "Flux": (flux, ("all-linear",), ()),
}


@dataclass(frozen=True)
class Built:
    """A denoiser in torch with PEFT's adapters, its engine with as many slots, and rows of it."""

    model: Any
    call: ComponentCall
    engine: Engine
    inputs: Mapping[str, Tensor]
    adapters: Path

    def run(self, adapters: list[str | None], order: list[int] | None = None) -> Array:
        """What the engine makes of the rows, in another order."""
        order = [*range(len(ROWS))] if order is None else order
        batched = {name for name, sizes in self.call.sizes.items() if sizes.get(0) is BATCH}
        arrays = {
            name: (tensor[order] if name in batched else tensor).numpy()
            for name, tensor in self.inputs.items()
        }
        (output,) = self.engine.run(arrays, adapter=adapters).values()
        return output

    def expected(self, adapter: str | None) -> Array:
        """What diffusers makes of all rows with one adapter."""
        with torch.no_grad():
            if adapter is None:
                with self.model.disable_adapter():
                    found = self.call.run(**self.inputs)
            else:
                self.model.set_adapter(adapter)
                found = self.call.run(**self.inputs)
        assert isinstance(found, Tensor)
        return np.asarray(found.numpy())


def rows_of(call: ComponentCall) -> dict[str, Tensor]:
    """Inputs of as many rows as `ROWS`, no two alike."""
    generator, inputs = torch.Generator().manual_seed(0), {}
    for name, example in call.inputs.items():
        shape = list(example.shape)
        if call.sizes[name].get(0) is BATCH:
            shape[0] = len(ROWS)
        inputs[name] = torch.rand(shape, generator=generator)
        if name == "timestep" and "img_ids" not in call.inputs:  # Flux multiplies it itself
            inputs[name] *= 999
    return inputs


def targets_of(model: nn.Module, *, kernels: bool) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        or (isinstance(module, nn.Conv2d) and (kernels or module.kernel_size == (1, 1)))
    ]


@pytest.fixture(scope="module", params=MODELS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("slots")
    make, targets, shapes = MODELS[request.param]
    base = make().eval()
    base.save_pretrained(folder / "unet")
    config = GraphConfig(
        folder / "unet", folder / "engine", targets, max_lora_rank=max(RANKS.values()),
        max_loras=len(RANKS), dtype="float32",
        shapes=shapes, flavour="tensorrt-rtx" if shapes else "none",
    )  # fmt: skip
    build_engine(config)
    call, names = component_call(base), targets_of(base, kernels="conv" in targets)
    model: Any = None
    for name, rank in RANKS.items():
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
        if model is None:
            model = get_peft_model(base, lora, name)
        else:
            model.add_adapter(name, lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    model.save_pretrained(str(folder / "adapters"))
    with open_engine(folder / "engine", "onnxruntime") as engine:
        for name in RANKS:
            coverage = engine.adapters.load(name, folder / "adapters" / name)
            assert len(coverage.adapted) == len(engine.manifest.sites) == len(names)
        yield Built(model.eval(), call, engine, rows_of(call), folder / "adapters")


def test_every_row_is_diffusers_with_its_own_adapter(built: Built) -> None:
    found = built.run([*ROWS])
    for adapter in dict.fromkeys(ROWS):
        expected = built.expected(adapter)
        for row in (row for row, each in enumerate(ROWS) if each == adapter):
            assert np.abs(found[row] - expected[row]).max() <= CLOSE * np.abs(expected).max(), row
            others = [built.expected(other)[row] for other in {*ROWS} - {adapter}]
            assert min(np.abs(found[row] - other).max() for other in others) > 1e-3
    order = [3, 0, 4, 2, 1]
    permuted = built.run([ROWS[row] for row in order], order)
    np.testing.assert_allclose(permuted, found[order], atol=CLOSE * np.abs(found).max())


def test_one_adapter_is_for_all_rows(built: Built) -> None:
    for adapter in ("sky", None):
        arrays = {name: tensor.numpy() for name, tensor in built.inputs.items()}
        (found,) = built.engine.run(arrays, adapter=adapter).values()
        expected = built.expected(adapter)
        assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max()


def test_a_plan_has_the_plugin_for_all_slots_and_verify_takes_it(
    built: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = built.engine.manifest
    if not manifest.profiles:
        assert "engine.plan" not in manifest.files
        return
    (ranges,) = manifest.profiles.values()
    assert (manifest.lora_plugin, manifest.max_loras) == ("plugin", len(RANKS))
    assert (ranges["lora_slot"].max, ranges["lora_A_conv_in"].max) == ((5,), (3, 36, 4))
    assert manifest.files["engine.plan"].size_bytes > 10_000
    words = ("verify", built.engine.directory, "--adapter", built.adapters / "ink")
    found = json.loads(trt_lora(capsys, *words, "--backend", "onnxruntime", "--json"))
    assert found["same"]  # linears and convolutions are merged
    assert found["outputs"][1]["change"] > 0.1
    assert max(each["largest"] for each in found["outputs"]) < 1e-4
