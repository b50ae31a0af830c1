"""Tiny random models and PEFT adapters, made by transformers and PEFT themselves."""

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.models.tiny_sizes import POSITIONS as POSITIONS
from support.models.tiny_sizes import VOCABULARY as VOCABULARY

from trt_lora.builder import BuildConfig
from trt_lora.builder.suppress_output import suppress_output

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What makes each architecture different is kept: grouped queries, biases, query norms, sliding
# windows, soft caps, fused projections, Conv1D.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": _COMMON,
    "Qwen2": _COMMON,
    "Qwen3": _COMMON | {"head_dim": 16},
    "Mistral": _COMMON | {"sliding_window": 4},
    "Gemma2": _COMMON | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "Phi3": _COMMON,
    "GPT2": _GPT2,
}
HEADS = {"GPT2": "GPT2LMHeadModel"}


@suppress_output()
def save_model(architecture: str, directory: Path, *, seed: int = 0, **fields: Any) -> Path:
    """Save a random model of two layers; its norms and biases are random too.

    `fields` replace those of the config.
    """
    torch.manual_seed(seed)
    sizes = ARCHITECTURES.get(architecture, _COMMON)
    config = getattr(transformers, f"{architecture}Config")(**sizes | fields)
    head = HEADS.get(architecture, f"{architecture}ForCausalLM")
    model = getattr(transformers, head)(config)
    for weight in model.parameters():
        weight.data = weight.data + 0.05 * torch.randn_like(weight)
    model.save_pretrained(directory)
    return directory


_WHOLE = ("trainable_tokens_delta", "modules_to_save")


@suppress_output()
def save_adapter(model: Path, directory: Path, *, seed: int = 0, **options: Any) -> Path:
    """Save a random PEFT adapter for `model`; all linears by default.

    Biases that it trains differ from the model's, but those of GPT-2's norms.
    """
    torch.manual_seed(seed)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    defaults: dict[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    config = LoraConfig(**defaults | options)
    adapted = get_peft_model(base, config)
    for name, weight in adapted.named_parameters():
        if "lora_magnitude" in name:  # a norm
            weight.data = weight.data * (1 + 0.3 * torch.rand_like(weight))
        elif "lora_" in name:
            weight.data = 0.2 * torch.randn_like(weight)
        elif any(n in name for n in _WHOLE) or _is_trained_bias(name, weight):
            weight.data = weight.data + 0.3 * torch.randn_like(weight)
    adapted.save_pretrained(str(directory))
    return directory


def _is_trained_bias(name: str, weight: torch.Tensor) -> bool:
    return weight.requires_grad and name.endswith(".bias") and "ln_" not in name


def tiny_config(model: Path, output: Path, **options: Any) -> BuildConfig:
    """A build that takes seconds: no plan unless a flavour is asked for."""
    defaults: dict[str, Any] = {
        "target_modules": ("all-linear",),
        "max_lora_rank": 16,
        "max_batch_size": 2,
        "max_input_len": POSITIONS // 2,
        "max_seq_len": POSITIONS,
        "dtype": "float32",
        "flavour": "none",
    }
    return BuildConfig(model, output, **defaults | options)
