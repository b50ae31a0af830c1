"""Names of a GGUF file's tensors in transformers, of models with the modules of Llama.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

import re

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
COMPUTED = ("rope_freqs.weight",)  # of config.json, not read

_OF_THE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]*)\.)?(\w+)\.(weight|bias)")


def transformers_name(own: str) -> str | None:
    """Return the name of a tensor in transformers; None: it has none.

    Args:
        own: in the file, such as `blk.0.attn_q.weight`.
    """
    if (found := _NAME.fullmatch(own)) is None:
        return None
    layer, module, end = found.groups()
    if layer is None:
        path = _OF_THE_MODEL.get(module)
        return path and f"{path}.{end}"
    path = _OF_A_LAYER.get(module)
    return path and f"model.layers.{layer}.{path}.{end}"
