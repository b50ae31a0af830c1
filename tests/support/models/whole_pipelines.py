"""Pipelines of diffusers with random weights and few of them, and adapters that diffusers saves."""

import copy
import string
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

DIFFUSERS: Any = diffusers  # whose classes have no types
TEXT, POOLED = 16, 24  # widths of what CLIP returns
_ENDS = ("<|startoftext|>", "<|endoftext|>")
# What adapters change, by component; convolutions without a kernel are among them.
TARGETS: Mapping[str, list[str]] = {
    "unet": ["to_q", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "time_emb_proj"],
    "transformer": ["to_q", "to_k", "proj_out", "linear"],
    "text_encoder": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "text_encoder_2": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1"],
}


def tokenizer() -> Any:
    """A token for each letter."""
    letters = (c + end for c in string.ascii_lowercase for end in ("", "</w>"))
    vocabulary = {token: number for number, token in enumerate((*_ENDS, *letters))}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=20)


def clip(kind: Any) -> Any:
    config = CLIPTextConfig(
        hidden_size=TEXT, intermediate_size=32, projection_dim=POOLED, num_hidden_layers=2,
        num_attention_heads=2, vocab_size=60, bos_token_id=0, eos_token_id=1,
        max_position_embeddings=20,
    )  # fmt: skip
    return kind(config)


def t5(config: Any = T5Config, model: Any = T5EncoderModel) -> Any:
    fields = config(
        d_model=2 * TEXT, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=60,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return model(fields)


def _unet(**options: Any) -> Any:
    """One layer in each block."""
    return DIFFUSERS.UNet2DConditionModel(
        layers_per_block=1, norm_num_groups=8, attention_head_dim=2, sample_size=8, **options
    )


def stable_diffusion() -> Any:
    blocks = {
        "block_out_channels": (16,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
    }
    return DIFFUSERS.StableDiffusionPipeline(
        None, clip(CLIPTextModel), tokenizer(), _unet(cross_attention_dim=TEXT, **blocks),
        DIFFUSERS.EulerDiscreteScheduler(steps_offset=1), None, None, requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl() -> Any:
    """Its outermost blocks have no attention."""
    unet = _unet(
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=2 * TEXT,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + POOLED,
    )
    texts = clip(CLIPTextModel), clip(CLIPTextModelWithProjection), tokenizer(), tokenizer()
    vae = DIFFUSERS.AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
    )
    scheduler = DIFFUSERS.EulerDiscreteScheduler()
    return DIFFUSERS.StableDiffusionXLPipeline(vae, *texts, unet, scheduler)


def stable_diffusion_3() -> Any:
    transformer = DIFFUSERS.SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=2 * TEXT, caption_projection_dim=16,
        pooled_projection_dim=2 * POOLED, pos_embed_max_size=16,
    )  # fmt: skip
    texts = (
        each for kind in (CLIPTextModelWithProjection,) * 2 for each in (clip(kind), tokenizer())
    )
    scheduler = DIFFUSERS.FlowMatchEulerDiscreteScheduler()
    return DIFFUSERS.StableDiffusion3Pipeline(
        transformer, scheduler, None, *texts, t5(), tokenizer()
    )


def flux() -> Any:
    transformer = DIFFUSERS.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=2 * TEXT, pooled_projection_dim=TEXT,
        guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    scheduler = DIFFUSERS.FlowMatchEulerDiscreteScheduler()
    texts = clip(CLIPTextModel), tokenizer(), t5(), tokenizer()
    return DIFFUSERS.FluxPipeline(scheduler, None, *texts, transformer)


def wan() -> Any:
    transformer = DIFFUSERS.WanTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=12,
        text_dim=2 * TEXT, ffn_dim=32, freq_dim=16, rope_max_seq_len=16,
    )  # fmt: skip
    scheduler = DIFFUSERS.FlowMatchEulerDiscreteScheduler()
    text = t5(UMT5Config, UMT5EncoderModel)
    return DIFFUSERS.WanPipeline(tokenizer(), text, None, scheduler, transformer)


PIPELINES: Mapping[str, Callable[[], Any]] = {
    "StableDiffusion": stable_diffusion,
    "StableDiffusionXL": stable_diffusion_xl,
    "StableDiffusion3": stable_diffusion_3,
    "Flux": flux,
    "Wan": wan,
}


def save_pipeline(kind: str, folder: Path) -> Any:
    """A pipeline of PIPELINES, which is saved in a folder."""
    torch.manual_seed(0)
    pipe = PIPELINES[kind]()
    for model in pipe.components.values():
        if isinstance(model, nn.Module):
            model.eval()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


def save_adapter(pipe: Any, file: Path, seed: int, components: Collection[str]) -> None:
    """Write an adapter of rank 2 + seed for components, as diffusers does."""
    layers: dict[str, Any] = {}
    for name in components:
        model = copy.deepcopy(getattr(pipe, name))
        torch.manual_seed(seed)
        own = LoraConfig(
            r=2 + seed, lora_alpha=3, target_modules=TARGETS[name], init_lora_weights=False
        )
        model.add_adapter(own)
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(model)
        layers[f"{name}_lora_adapter_metadata"] = model.peft_config["default"].to_dict()
    type(pipe).save_lora_weights(file.parent, weight_name=file.name, **layers)
