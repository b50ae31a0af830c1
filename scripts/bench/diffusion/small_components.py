"""Small random components of pipelines with the blocks of real ones."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

TEXT = 16  # width of what denoisers read of a text
_UNET: dict[str, Any] = {"cross_attention_dim": TEXT, "attention_head_dim": 2, "norm_num_groups": 8}
_UNET_OF_TWO = _UNET | {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_XL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + TEXT,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 2}
_DIT: dict[str, Any] = _HEADS | {"num_layers": 1, "attention_head_dim": 16}
_JOINT: dict[str, Any] = _DIT | {"in_channels": 16, "joint_attention_dim": TEXT}
_CLIP: dict[str, Any] = _HEADS | {
    "hidden_size": 16, "intermediate_size": 32, "projection_dim": 24, "num_hidden_layers": 2,
    "vocab_size": 1000, "bos_token_id": 998, "eos_token_id": 999,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 1000,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_VIT: dict[str, Any] = _HEADS | {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def _of_diffusers(name: str, fields: Mapping[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, name)(**fields)


def _of_transformers(name: str, config: str, fields: Mapping[str, Any]) -> Any:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**fields))


MODELS: Mapping[str, Callable[[], Any]] = {
    "SD1.5's UNet": partial(_of_diffusers, "UNet2DConditionModel", _UNET_OF_TWO),
    "SDXL's UNet": partial(_of_diffusers, "UNet2DConditionModel", _UNET_OF_TWO | _XL),
    "SD3": partial(_of_diffusers, "SD3Transformer2DModel", _JOINT | {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8,
        "caption_projection_dim": 16, "pooled_projection_dim": TEXT, "pos_embed_max_size": 16,
    }),
    "Flux": partial(_of_diffusers, "FluxTransformer2DModel", _JOINT | {
        "num_single_layers": 1, "pooled_projection_dim": TEXT, "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    }),
    "Flux.2": partial(_of_diffusers, "Flux2Transformer2DModel", _JOINT | {
        "num_single_layers": 1, "axes_dims_rope": (4, 4, 4, 4),
    }),
    "Qwen-Image": partial(_of_diffusers, "QwenImageTransformer2DModel", _JOINT | {
        "out_channels": 4, "axes_dims_rope": (4, 6, 6),
    }),
    "Wan": partial(_of_diffusers, "WanTransformer3DModel", _DIT | {
        "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": TEXT,
        "num_layers": 2, "ffn_dim": 32, "rope_max_seq_len": 16,
    }),
    "CLIP-L": partial(_of_transformers, "CLIPTextModel", "CLIPTextConfig", _CLIP),
    "CLIP-G": partial(_of_transformers, "CLIPTextModelWithProjection", "CLIPTextConfig", _CLIP),
    "T5": partial(_of_transformers, "T5EncoderModel", "T5Config", _T5),
    "UMT5": partial(_of_transformers, "UMT5EncoderModel", "UMT5Config", _T5),
    "ViT": partial(_of_transformers, "ViTModel", "ViTConfig", _VIT),
    "ViT with classes": partial(_of_transformers, "ViTForImageClassification", "ViTConfig", _VIT),
}  # fmt: skip
# SD1.5's whole structure: blocks, layers and heads are its own, widths are a tenth.
SD15 = partial(
    _of_diffusers, "UNet2DConditionModel", _UNET | {"block_out_channels": (32, 64, 64, 64)}
)
