"""A random SDXL of small widths, with adapters that diffusers has saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from trt_lora.scripts.bench.diffusion.small_components import MODELS

TARGETS = {  # of the adapter "style"; "face" has none for the first text encoder
    "unet": ["to_q", "to_v", "proj_in", "ff.net.0.proj"],
    "text_encoder": ["q_proj", "fc1"],
    "text_encoder_2": ["v_proj", "out_proj"],
}
_CLASSES = {
    "unet": ["diffusers", "UNet2DConditionModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "vae": ["diffusers", "AutoencoderKL"],
    "image_encoder": [None, None],
}


def save_sdxl(folder: Path) -> dict[str, Any]:
    """Save the components that take LoRA, and return them."""
    torch.manual_seed(0)
    kinds = {"unet": "SDXL's UNet", "text_encoder": "CLIP-L", "text_encoder_2": "CLIP-G"}
    models = {name: MODELS[kind]() for name, kind in kinds.items()}
    for name, model in models.items():
        model.eval().save_pretrained(folder / name)
    index = {"_class_name": "StableDiffusionXLPipeline", **_CLASSES, "requires_safety": False}
    (folder / "model_index.json").write_text(json.dumps(index))
    return models


def save_adapter(models: Mapping[str, nn.Module], folder: Path, name: str, rank: int) -> None:
    """Add an adapter to the models, and save it as diffusers does, for all of them in one file."""
    saved: dict[str, Any] = {}
    for component, model in models.items():
        if (component, name) == ("text_encoder", "face"):
            continue
        config: Any = LoraConfig(r=rank, lora_alpha=3, target_modules=TARGETS[component])
        model.add_adapter(config, name)  # type: ignore[operator]
        for path, weight in model.named_parameters():
            if f"lora_B.{name}" in path:
                nn.init.normal_(weight, std=0.1)
        state = get_peft_model_state_dict(model, adapter_name=name)
        saved[f"{component}_lora_layers"] = state
        saved[f"{component}_lora_adapter_metadata"] = config.to_dict()
    file = f"{name}.safetensors"
    library: Any = diffusers  # whose classes have no types
    library.StableDiffusionXLPipeline.save_lora_weights(folder, weight_name=file, **saved)


def activate(model: nn.Module, weights: Mapping[str, float]) -> None:
    """Let the sum of adapters be active in a model, by PEFT's own scaling."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            own = [name for name in weights if name in layer.lora_A]
            layer.enable_adapters(bool(own))
            layer.set_adapter(own)
            for name in own:
                layer.set_scale(name, weights[name])
