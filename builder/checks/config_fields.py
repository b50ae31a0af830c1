"""Validate config.json without importing torch or transformers, which takes seconds."""

from collections.abc import Mapping
from typing import Any

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.model_errors import unsupported
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown

# transformers' name, MPT's, and Whisper's for its answers.
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")

STATE = "layers keep a state (state space or linear attention), not keys and values"
# They take masks or positions from one length for all rows of a KV cache.
_ONE_LENGTH_TYPES = ("gpt_neo", "moss_transcribe_diarize", "roformer")
ENCODER = "its layers attend to an encoder (cross attention)"
# Some of them are built as encoder-decoders; here they are decoders without their encoder.
_ENCODER_TYPES = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("pegasus", "plbart", "prophetnet", "trocr", "whisper"),
)
_STATEFUL_TYPES = (
    *("bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid"),
    *("jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp"),
    *("qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zaya"),
)

REFUSED_TYPES: Mapping[str, str] = {
    "blt": "it reads bytes in patches (cross attention)",
    "cpmant": "it puts a prompt of fixed length before every input",
    "doge": "its attention masks keys by their values (dynamic mask attention)",
    "git": "it takes images beside tokens",
    "mpt": "it cuts its position bias (ALiBi) to a length that a graph cannot leave open",
    "openai-gpt": "it has no cache of keys and values",
    "reformer": "its attention hashes, and its cache holds hidden states",
    "xlm": "it has no cache of keys and values",
    "xlnet": "it is not a decoder, and its cache holds hidden states",
    **dict.fromkeys(_ONE_LENGTH_TYPES, "rows of different lengths change each other's answers"),
    **dict.fromkeys(_ENCODER_TYPES, ENCODER),
    **dict.fromkeys(_STATEFUL_TYPES, STATE),
}


def check_fields(checkpoint: Checkpoint) -> None:
    """Refuse what the config.json says that no engine can be.

    Raises:
        ModelError: the weights are in codes that are not read, or in a file of another name, or the
            model is of a type that cannot be an engine.
    """
    path, fields = checkpoint.config_path, checkpoint.fields
    _ = checkpoint.quantisation  # refuses what is not read
    if weights := fields.get("transformers_weights"):
        raise ModelError(
            f"{path}: transformers_weights is {shown(weights)}; name that file "
            "model.safetensors and remove the field"
        )
    model_type = None if checkpoint.is_encoder_decoder else fields.get("model_type")
    if isinstance(model_type, str) and (reason := REFUSED_TYPES.get(model_type)):
        raise unsupported(architecture(fields), reason)


def stated_positions(fields: Mapping[str, Any]) -> int | None:
    """Return how many positions a config.json gives the model; None if it does not say."""
    text = fields.get("text_config")
    text = text if isinstance(text, Mapping) else fields
    stated = (text.get(name) for name in POSITIONS)
    return next((count for count in stated if type(count) is int and count > 0), None)


def architecture(fields: Mapping[str, Any]) -> str:
    """Return the first class that a config.json names, else its type in words."""
    names = fields.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return f"a model of type {fields.get('model_type')}"
