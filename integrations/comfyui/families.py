"""How ComfyUI calls each family of models, and what diffusers' models, the engines, call the same.

ComfyUI: https://github.com/comfyanonymous/ComfyUI/blob/v0.3.64/comfy/model_base.py; the engines:
`builder/export/component_calls.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Manifest

SIZES = 6  # numbers beside SDXL's text: height and width of original, crop and target


@dataclass(frozen=True)
class Call:
    """One call of a denoiser by ComfyUI."""

    x: Tensor  # [batch, channels, height, width]
    timesteps: Tensor  # [batch]
    context: Tensor  # [batch, tokens, width]
    y: Tensor | None  # [batch, width]: the pooled text, and SDXL's sizes
    guidance: Tensor | None  # [batch]


@dataclass(frozen=True)
class Family:
    """One family of models."""

    config: str  # ComfyUI's class in comfy.supported_models
    sign: str  # an input that engines of this family have, and of those below it none
    inputs: Callable[[Call], dict[str, Tensor]]
    output: Callable[[Tensor, Call], Tensor] = lambda output, call: output


def _unet(call: Call) -> dict[str, Tensor]:
    return {
        "sample": call.x,
        "timestep": call.timesteps,
        "encoder_hidden_states": call.context,
    }


def _unet_xl(call: Call) -> dict[str, Tensor]:
    y = _pooled(call)
    return _unet(call) | {"text_embeds": y[:, :-SIZES], "time_ids": y[:, -SIZES:]}


def _sd3(call: Call) -> dict[str, Tensor]:
    return {
        "hidden_states": call.x,
        "encoder_hidden_states": call.context,
        "pooled_projections": _pooled(call),
        "timestep": call.timesteps,
    }


def _flux(call: Call) -> dict[str, Tensor]:
    """Latents as tokens of 2x2 patches, each with its row and column."""
    batch, channels, height, width = call.x.shape
    if height % 2 or width % 2:
        raise ConfigError(
            f"a latent of {height}x{width} has no whole patches of 2x2; take a height and width of "
            "the picture that are multiples of 16"
        )
    rows, columns = height // 2, width // 2
    patches = call.x.reshape(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    places = torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns))
    found = {
        "hidden_states": patches.reshape(batch, rows * columns, channels * 4),
        "encoder_hidden_states": call.context,
        "pooled_projections": _pooled(call),
        "timestep": call.timesteps,
        "img_ids": places,
        "txt_ids": torch.zeros(call.context.shape[1], 3),
    }
    return found if call.guidance is None else found | {"guidance": call.guidance}


def _picture(tokens: Tensor, call: Call) -> Tensor:
    """Latents of Flux's tokens again."""
    batch, _, height, width = call.x.shape
    patches = tokens.reshape(batch, height // 2, width // 2, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, -1, height, width)


def _pooled(call: Call) -> Tensor:
    if call.y is None:
        raise ConfigError("the conditioning has no pooled text; encode it with this model's CLIP")
    return call.y


FAMILIES = (
    Family("Flux", "guidance", _flux, _picture),
    Family("FluxSchnell", "img_ids", _flux, _picture),
    Family("SD3", "pooled_projections", _sd3),
    Family("SDXL", "time_ids", _unet_xl),
    Family("SD15", "sample", _unet),
)


def family_of(manifest: Manifest) -> Family:
    """Return the family of a denoiser's engine, which its inputs tell.

    Raises:
        ConfigError: it is of none that ComfyUI's calls are known of.
    """
    inputs = {binding.name for binding in manifest.inputs}
    for family in FAMILIES:
        if family.sign in inputs:
            return family
    known = ", ".join(family.config for family in FAMILIES)
    raise ConfigError(f"{manifest.base_model.name} is none of the models known here: {known}")


def sizes_beside_text(conditions: Mapping[str, Any]) -> Tensor:
    """SDXL's pooled text and six sizes as numbers [1, width + 6]; the engine embeds them itself."""
    height, width = conditions.get("height", 768), conditions.get("width", 768)
    sizes = [height, width, conditions.get("crop_h", 0), conditions.get("crop_w", 0)]
    sizes += [conditions.get("target_height", height), conditions.get("target_width", width)]
    pooled: Tensor = conditions["pooled_output"]
    return torch.cat([pooled.float(), torch.tensor([sizes]).to(pooled).expand(len(pooled), -1)], 1)
