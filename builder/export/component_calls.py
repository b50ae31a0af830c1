"""How the denoisers and text encoders of diffusers' pipelines are called: inputs, sizes, outputs.

Widths are those of each config; every other size of an input varies, as a multiple where the model
halves it. Pipelines call them so:
https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/pipelines
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from trt_lora.plugins.errors import ModelError

Size = Any  # a number, or a `Dim` or multiple of one


@dataclass(frozen=True)
class ComponentCall:
    """One run of a component."""

    inputs: Mapping[str, Tensor]  # examples, by name
    sizes: Mapping[str, Mapping[int, Size]]  # those that vary, by input and axis
    run: Callable[..., Tensor | tuple[Tensor, ...]]  # takes the inputs by name
    outputs: tuple[str, ...] = ("sample",)


BATCH, TOKENS, PATCHES = Dim("batch"), Dim("tokens"), Dim("patches")
_BATCH, _TOKENS, _PATCHES = 2, 5, 12  # of the examples


def component_call(model: Any) -> ComponentCall:
    """Return how a component is called.

    Args:
        model: a module of diffusers or transformers.

    Raises:
        ModelError: an option of its config is not known.
        KeyError: its class is none of COMPONENTS.
    """
    return COMPONENTS[type(model).__name__](model)


def _unet(model: Any) -> ComponentCall:
    config, dtype = model.config, model.dtype
    for option in ("class_embed_type", "encoder_hid_dim_type", "num_class_embeds"):
        if value := getattr(config, option, None):
            raise _untraced(option, value)
    if not isinstance(config.cross_attention_dim, int):
        raise _untraced("cross_attention_dim", config.cross_attention_dim)
    factor = 2 ** (len(config.block_out_channels) - 1)
    inputs = {
        "sample": torch.zeros(_BATCH, config.in_channels, 2 * factor, 3 * factor, dtype=dtype),
        "timestep": torch.zeros(_BATCH),
        "encoder_hidden_states": torch.zeros(
            _BATCH, _TOKENS, config.cross_attention_dim, dtype=dtype
        ),
    }
    picture = {2: factor * Dim("height"), 3: factor * Dim("width")}
    sizes = {"sample": {0: BATCH, **picture}, "encoder_hidden_states": {0: BATCH, 1: TOKENS}}
    if config.addition_embed_type == "text_time":
        ids = 6  # of sizes and crops
        width = config.projection_class_embeddings_input_dim - ids * config.addition_time_embed_dim
        inputs["text_embeds"] = torch.zeros(_BATCH, width, dtype=dtype)
        inputs["time_ids"] = torch.zeros(_BATCH, ids, dtype=dtype)
    elif config.addition_embed_type is not None:
        raise _untraced("addition_embed_type", config.addition_embed_type)

    def run(
        sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **added: Tensor
    ) -> Any:
        return model(
            sample,
            timestep,
            encoder_hidden_states,
            added_cond_kwargs=added or None,
            return_dict=False,
        )[0]

    return ComponentCall(inputs, {name: sizes.get(name, {0: BATCH}) for name in inputs}, run)


def _untraced(option: str, value: object) -> ModelError:
    return ModelError(
        f"a UNet whose {option} is {value!r} is not traced; export it, and pass --onnx FILE"
    )


def _sd3(model: Any) -> ComponentCall:
    config, dtype = model.config, model.dtype
    side = 2 * config.patch_size
    inputs = {
        "hidden_states": torch.zeros(_BATCH, config.in_channels, side, 2 * side, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            _BATCH, _TOKENS, config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.zeros(_BATCH, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.zeros(_BATCH),
    }
    most = config.pos_embed_max_size
    picture = {
        2: config.patch_size * Dim("height", max=most),
        3: config.patch_size * Dim("width", max=most),
    }
    sizes: dict[str, dict[int, Size]] = {name: {0: BATCH} for name in inputs}
    sizes["hidden_states"] |= picture
    sizes["encoder_hidden_states"] |= {1: TOKENS}

    def run(**given: Tensor) -> Any:
        return model(**given, return_dict=False)[0]

    return ComponentCall(inputs, sizes, run)


def _flux(model: Any) -> ComponentCall:
    config, dtype = model.config, model.dtype
    inputs = {
        "hidden_states": torch.zeros(_BATCH, _PATCHES, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            _BATCH, _TOKENS, config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.zeros(_BATCH, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.zeros(_BATCH, dtype=dtype),
        "img_ids": torch.zeros(_PATCHES, 3, dtype=dtype),
        "txt_ids": torch.zeros(_TOKENS, 3, dtype=dtype),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.zeros(_BATCH)
    sizes: dict[str, dict[int, Size]] = {name: {0: BATCH} for name in inputs}
    sizes["hidden_states"] |= {1: PATCHES}
    sizes["encoder_hidden_states"] |= {1: TOKENS}
    sizes |= {"img_ids": {0: PATCHES}, "txt_ids": {0: TOKENS}}

    def run(**given: Tensor) -> Any:
        return model(**given, return_dict=False)[0]

    return ComponentCall(inputs, sizes, run)


def _clip(model: Any) -> ComponentCall:
    """Both what SD1.5 reads, the last layer's, and SDXL, the one before; and what is pooled."""
    has_projection = type(model).__name__.endswith("WithProjection")

    def run(input_ids: Tensor) -> tuple[Tensor, ...]:
        out = model(input_ids, output_hidden_states=True)
        pooled = out.text_embeds if has_projection else out.pooler_output
        return out.last_hidden_state, out.hidden_states[-2], pooled

    ids = torch.zeros(_BATCH, model.config.max_position_embeddings, dtype=torch.long)
    outputs = ("last_hidden_state", "hidden_state_2", "pooled")
    return ComponentCall({"input_ids": ids}, {"input_ids": {0: BATCH}}, run, outputs)


def _t5(model: Any) -> ComponentCall:
    def run(input_ids: Tensor) -> Tensor:
        hidden: Tensor = model(input_ids).last_hidden_state
        return hidden

    ids = torch.zeros(_BATCH, _TOKENS, dtype=torch.long)
    sizes = {"input_ids": {0: BATCH, 1: TOKENS}}
    return ComponentCall({"input_ids": ids}, sizes, run, ("last_hidden_state",))


COMPONENTS: Mapping[str, Callable[[Any], ComponentCall]] = {
    "CLIPTextModel": _clip,
    "CLIPTextModelWithProjection": _clip,
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "T5EncoderModel": _t5,
    "UNet2DConditionModel": _unet,
}
