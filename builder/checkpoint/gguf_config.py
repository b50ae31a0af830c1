"""What a GGUF file says of its model, beside what config.json says."""

import math
from collections.abc import Mapping
from typing import Any

from trt_lora.builder.checkpoint.gguf_file import GgufFile
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown

# Values of model_type in config.json, by general.architecture.
_MODEL_TYPES = {"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
_MOVES_ROWS = "llama"
_HEADS, _KEY_HEADS = "attention.head_count", "attention.head_count_kv"
# What both say, each by its own name.
_SHARED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    _HEADS: "num_attention_heads",
    _KEY_HEADS: "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def check_config(file: GgufFile, fields: Mapping[str, Any]) -> None:
    """Refuse a file of a model that is not read, or is another than that of config.json.

    Raises:
        ModelError: it is such a file.
    """
    architecture, stated = file.metadata.get("general.architecture"), fields.get("model_type")
    types = _MODEL_TYPES.get(str(architecture))
    if types is None or stated not in types:
        choices = f"of {', '.join(_MODEL_TYPES)}" if types is None else " or ".join(types)
        raise refusal(
            file,
            f"its architecture is {shown(architecture)}, and model_type in config.json is "
            f"{shown(stated)}, where {choices} is read",
        )
    for key, name in _SHARED.items():
        own, other = _stated(file, key), _configured(fields, name)
        if own is not None and other is not None and not _is_equal(own, other):
            reason = f"its {key} is {shown(own)}, and {name} in config.json is {shown(other)}"
            raise refusal(file, reason)


def heads_of_moved_rows(file: GgufFile) -> Mapping[str, int]:
    """Return, by names of linears, the number of heads in which their rows are not as trained.

    llama.cpp's converter puts them side by side that its rotary embedding turns together, of
    models that were trained with them half a head apart.

    Raises:
        ModelError: the file does not say how many there are.
    """
    if file.metadata["general.architecture"] != _MOVES_ROWS:
        return {}
    counts = {"attn_q": _stated(file, _HEADS), "attn_k": _stated(file, _KEY_HEADS)}
    for name, heads in counts.items():
        if type(heads) is not int or heads < 1:
            raise refusal(file, f"it says that {name} has {shown(heads)} heads")
    return counts


def refusal(file: GgufFile, reason: str) -> ModelError:
    """Return the error of a model that cannot be read of a file."""
    return ModelError(
        f"{file.path}: {reason}; pass the file with the config.json of its own model, or the "
        "model's safetensors"
    )


def _stated(file: GgufFile, key: str) -> Any:
    """A size; keys have as many heads as queries, where the file does not say it."""
    own = file.metadata.get(f"{file.metadata['general.architecture']}.{key}")
    return _stated(file, _HEADS) if own is None and key == _KEY_HEADS else own


def _configured(fields: Mapping[str, Any], name: str) -> Any:
    rope = fields.get("rope_parameters")
    return fields.get(name, rope.get(name) if isinstance(rope, Mapping) else None)


def _is_equal(stated: object, configured: object) -> bool:
    """Whether both are one number; floats of the file have 24 bits."""
    if not isinstance(stated, int | float) or not isinstance(configured, int | float):
        return False
    return math.isclose(stated, configured, rel_tol=1e-6)
