"""How the denoisers and text encoders of diffusers' pipelines are called: inputs, sizes, outputs.

Widths are those of each config; every other size of an input varies, as a multiple where the model
halves it. Pipelines call them so:
https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/pipelines
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from trt_lora.builder.export.real_rope import given_rope
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
_OF_TEXT, _OF_PATCHES = {0: BATCH, 1: TOKENS}, {0: BATCH, 1: PATCHES}


def component_call(model: Any) -> ComponentCall:
    """Return how a component is called.

    Args:
        model: a module of diffusers or transformers.

    Raises:
        ModelError: an option of its config is not known.
        KeyError: its class is none of COMPONENTS.
    """
    return COMPONENTS[type(model).__name__](model)


def _denoiser(
    model: Any, inputs: Mapping[str, Tensor], sizes: Mapping[str, Mapping[int, Size]]
) -> ComponentCall:
    """Return the call of a model that takes its inputs by name.

    Inputs without sizes vary in rows alone.
    """

    def run(**given: Tensor) -> Any:
        return model(**given, return_dict=False)[0]

    return ComponentCall(inputs, {name: sizes.get(name, {0: BATCH}) for name in inputs}, run)


def _unet(model: Any) -> ComponentCall:
    config, dtype = model.config, model.dtype
    for option in ("class_embed_type", "encoder_hid_dim_type", "num_class_embeds"):
        if value := getattr(config, option, None):
            raise _untraced("UNet", option, value)
    if not isinstance(config.cross_attention_dim, int):
        raise _untraced("UNet", "cross_attention_dim", config.cross_attention_dim)
    factor = 2 ** (len(config.block_out_channels) - 1)
    inputs = {
        "sample": torch.zeros(_BATCH, config.in_channels, 2 * factor, 3 * factor, dtype=dtype),
        "timestep": torch.zeros(_BATCH),
        "encoder_hidden_states": torch.zeros(
            _BATCH, _TOKENS, config.cross_attention_dim, dtype=dtype
        ),
    }
    picture = {2: factor * Dim("height"), 3: factor * Dim("width")}
    sizes = {"sample": {0: BATCH, **picture}, "encoder_hidden_states": _OF_TEXT}
    if config.addition_embed_type == "text_time":
        ids = 6  # of sizes and crops
        width = config.projection_class_embeddings_input_dim - ids * config.addition_time_embed_dim
        inputs["text_embeds"] = torch.zeros(_BATCH, width, dtype=dtype)
        inputs["time_ids"] = torch.zeros(_BATCH, ids, dtype=dtype)
    elif config.addition_embed_type is not None:
        raise _untraced("UNet", "addition_embed_type", config.addition_embed_type)

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


def _untraced(kind: str, option: str, value: object) -> ModelError:
    return ModelError(
        f"a {kind} whose {option} is {value!r} is not traced; export it, and pass --onnx FILE"
    )


def _sd3(model: Any) -> ComponentCall:
    config, dtype = model.config, model.dtype
    latent = (config.in_channels, 3 * config.patch_size, 4 * config.patch_size)
    inputs = {
        "hidden_states": torch.zeros(_BATCH, *latent, dtype=dtype),
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
    sizes = {"hidden_states": {0: BATCH, **picture}, "encoder_hidden_states": _OF_TEXT}
    return _denoiser(model, inputs, sizes)


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
    sizes = {
        "hidden_states": _OF_PATCHES,
        "encoder_hidden_states": _OF_TEXT,
        "img_ids": {0: PATCHES},
        "txt_ids": {0: TOKENS},
    }
    return _denoiser(model, inputs, sizes)


def _flux2(model: Any) -> ComponentCall:
    config, dtype = model.config, model.dtype
    axes = len(config.axes_dims_rope)
    inputs = {
        "hidden_states": torch.zeros(_BATCH, _PATCHES, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            _BATCH, _TOKENS, config.joint_attention_dim, dtype=dtype
        ),
        "timestep": torch.zeros(_BATCH, dtype=dtype),
        "img_ids": torch.zeros(_BATCH, _PATCHES, axes, dtype=torch.long),
        "txt_ids": torch.zeros(_BATCH, _TOKENS, axes, dtype=torch.long),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.zeros(_BATCH)
    sizes = {"hidden_states": _OF_PATCHES, "encoder_hidden_states": _OF_TEXT}
    return _denoiser(model, inputs, sizes | {"img_ids": _OF_PATCHES, "txt_ids": _OF_TEXT})


def _qwen(model: Any) -> ComponentCall:
    """Its complex rotary tables of picture and text [s, d / 2] are inputs, as pairs of reals."""
    config, dtype = model.config, model.dtype
    for option in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope", "zero_cond_t"):
        if getattr(config, option):
            raise _untraced("Qwen-Image transformer", option, value=True)
    width = config.attention_head_dim // 2
    inputs = {
        "hidden_states": torch.zeros(_BATCH, _PATCHES, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            _BATCH, _TOKENS, config.joint_attention_dim, dtype=dtype
        ),
        "encoder_hidden_states_mask": torch.ones(_BATCH, _TOKENS, dtype=torch.long),
        "timestep": torch.zeros(_BATCH, dtype=dtype),
        "img_rope": torch.zeros(_PATCHES, width, 2),
        "txt_rope": torch.zeros(_TOKENS, width, 2),
    }
    sizes = {
        "hidden_states": _OF_PATCHES,
        "encoder_hidden_states": _OF_TEXT,
        "encoder_hidden_states_mask": _OF_TEXT,
        "img_rope": {0: PATCHES},
        "txt_rope": {0: TOKENS},
    }
    call = _denoiser(model, inputs, sizes)

    def run(img_rope: Tensor, txt_rope: Tensor, **given: Tensor) -> Any:
        with given_rope(model.pos_embed, img_rope, txt_rope):
            return call.run(**given)

    return replace(call, run=run)


def _wan(model: Any) -> ComponentCall:
    """Wan's from a text; the sizes of a video are multiples of its patches'."""
    config, dtype = model.config, model.dtype
    for option in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
        if (value := getattr(config, option)) is not None:
            raise _untraced("Wan transformer", option, value)
    patch = config.patch_size
    video = [count * size for count, size in zip((2, 3, 4), patch, strict=True)]
    inputs = {
        "hidden_states": torch.zeros(_BATCH, config.in_channels, *video, dtype=dtype),
        "timestep": torch.zeros(_BATCH),
        "encoder_hidden_states": torch.zeros(_BATCH, _TOKENS, config.text_dim, dtype=dtype),
    }
    most = config.rope_max_seq_len
    names = ("frames", "height", "width")
    axes = {
        axis: size * Dim(name, max=most)
        for axis, (name, size) in enumerate(zip(names, patch, strict=True), 2)
    }
    sizes = {"hidden_states": {0: BATCH, **axes}, "encoder_hidden_states": _OF_TEXT}
    return _denoiser(model, inputs, sizes)


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
    def run(**given: Tensor) -> Tensor:
        hidden: Tensor = model(**given).last_hidden_state
        return hidden

    inputs = {"input_ids": torch.zeros(_BATCH, _TOKENS, dtype=torch.long)}
    return ComponentCall(inputs, dict.fromkeys(inputs, _OF_TEXT), run, ("last_hidden_state",))


def _umt5(model: Any) -> ComponentCall:
    """T5's with the mask that Wan's pipeline passes, of the tokens that are text."""
    call = _t5(model)
    mask = torch.ones(_BATCH, _TOKENS, dtype=torch.long)
    inputs = {**call.inputs, "attention_mask": mask}
    return replace(call, inputs=inputs, sizes=dict.fromkeys(inputs, _OF_TEXT))


def _vit(model: Any) -> ComponentCall:
    config = model.config
    side = config.image_size
    pixels = torch.zeros(_BATCH, config.num_channels, side, side, dtype=model.dtype)
    call = ComponentCall({"pixel_values": pixels}, {"pixel_values": {0: BATCH}}, model)
    if type(model).__name__ == "ViTForImageClassification":
        return replace(
            call, run=lambda pixel_values: model(pixel_values).logits, outputs=("logits",)
        )

    def run(pixel_values: Tensor) -> tuple[Tensor, ...]:
        found = model(pixel_values)
        return found.last_hidden_state, found.pooler_output

    return replace(call, run=run, outputs=("last_hidden_state", "pooled"))


COMPONENTS: Mapping[str, Callable[[Any], ComponentCall]] = {
    "CLIPTextModel": _clip,
    "CLIPTextModelWithProjection": _clip,
    "Flux2Transformer2DModel": _flux2,
    "FluxTransformer2DModel": _flux,
    "QwenImageTransformer2DModel": _qwen,
    "SD3Transformer2DModel": _sd3,
    "T5EncoderModel": _t5,
    "UMT5EncoderModel": _umt5,
    "UNet2DConditionModel": _unet,
    "ViTForImageClassification": _vit,
    "ViTModel": _vit,
    "WanTransformer3DModel": _wan,
}
# Why others are not.
UNTRACED: Mapping[str, str] = {
    "ZImageTransformer2DModel": "it takes lists of pictures and texts, and pads each by its length",
}
