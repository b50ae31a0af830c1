"""A small random model of every causal language model that transformers has."""

from typing import Any

import torch
from support.models.tiny_models import POSITIONS, VOCABULARY
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trt_lora.builder.suppress_output import suppress_output

# Every model type that `AutoModelForCausalLM` knows.
MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    *("decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
# What configs call a size, and the size that it gets.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32),
    **dict.fromkeys(("emb_dim", "embedding_dim", "word_embed_proj_dim", "true_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "d_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    # RoBERTa and its kin leave the first few out.
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS + 8
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "v_head_dim": 12,
    "rotary_dim": 4,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), 4),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Set even where the default is None.
_ALWAYS = ("head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id")

# What makes the generic sizes invalid, or a part of the architecture unused.
_DECODER = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_ONE_DENSE = {"first_k_dense_replace": 1, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXED = {
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}
_OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _DECODER},
    "bamba": _MAMBA,
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "deepseek_v2": _ONE_DENSE | {"num_experts_per_tok": 2},
    "deepseek_v3": _ONE_DENSE,
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "youtu": _ONE_DENSE | {"pad_token_id": None},  # transformers clears its row of the embeddings
    "zaya": {"num_experts_per_tok": 1},
}
_OVERRIDES["reformer"] |= {"axial_pos_embds": False}


def small_config(model_type: str, layers: int = 2) -> Any:
    """Return a config of so many layers with all that makes the architecture different."""
    return _small(CONFIG_MAPPING[model_type], _OVERRIDES.get(model_type, {}), layers)


def _small(kind: Any, overrides: dict[str, Any], layers: int) -> Any:
    defaults = kind().to_dict()
    sizes = _SIZES | dict.fromkeys(_LAYERS, layers)
    fields = {name: size for name, size in sizes.items() if defaults.get(name) is not None}
    fields |= {name: _SIZES[name] for name in _ALWAYS if name in defaults}
    kinds = sorted(set(defaults.get("layer_types") or ()))
    if kinds:
        fields["layer_types"] = (kinds * 2)[-layers:]
    for name, inner in kind.sub_configs.items():
        part = defaults.get(name)
        if isinstance(part, dict):
            own = CONFIG_MAPPING[str(part["model_type"])] if inner is AutoConfig else inner
            fields[name] = _small(own, overrides.get(name, {}), layers).to_dict()
    overrides = {key: value for key, value in overrides.items() if key not in kind.sub_configs}
    return kind(**fields | overrides)


@suppress_output()
def small_model(model_type: str, layers: int = 2) -> Any:
    """Return a random float32 model whose norms and biases are random too."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(small_config(model_type, layers), dtype=torch.float32)
    for weight in model.parameters():
        weight.data = weight.data + 0.05 * torch.randn_like(weight)
    return model
