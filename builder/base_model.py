"""Load the base model, and what the manifest says of it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trt_lora.builder.attention import ATTENTION
from trt_lora.builder.quiet import quiet
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.modules import parts_of
from trt_lora.runtime.manifest import BaseModel

# They change with the release that saved the config, not with the model.
_VOLATILE_FIELDS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


def read_config(directory: Path) -> Any:
    """Return the transformers config of a causal language model.

    Raises:
        ModelError: there is no model, or it is of another kind.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no config.json: it is not a model directory. "
            "Pass the folder that save_pretrained wrote or the model hub downloaded"
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    architectures = config.architectures or []
    if not set(architectures) & set(_causal_classes()):
        raise ModelError(
            f"{directory} holds {', '.join(architectures) or 'a model without architectures'}, "
            "not a causal language model; expected a class such as LlamaForCausalLM"
        )
    return config


def _causal_classes() -> Iterator[str]:
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        yield from (names,) if isinstance(names, str) else names


def load_model(directory: Path, dtype: str) -> Any:
    """Return the model in `dtype` on the CPU, in evaluation mode.

    Raises:
        ModelError: its weights are missing or damaged.
    """
    try:
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
            )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelError(f"the weights in {directory} cannot be loaded: {error}") from error
    return model.eval()


def head_dim(config: Any) -> int:
    """Return the width of an attention head; 0 where the config does not say, or not one."""
    try:
        width = getattr(config, "head_dim", None)
    except AmbiguousGlobalPerLayerAttributeError:  # it varies from layer to layer
        return 0
    heads, hidden = (getattr(config, key, None) for key in ("num_attention_heads", "hidden_size"))
    return int(width or (hidden // heads if heads and hidden else 0))


def output_widths(config: Any, path: str, n: int) -> tuple[int, ...]:
    """Return the widths of a fused linear's outputs; empty if it is none, or they do not fit `n`.

    Args:
        config: of the model.
        path: of the module.
        n: its number of outputs.
    """
    names = parts_of(path)
    if "attn_q" in names:
        heads = config.num_attention_heads
        counts = (heads, *[getattr(config, "num_key_value_heads", None) or heads] * 2)
        widths = tuple(count * head_dim(config) for count in counts)
    else:
        widths = (n // len(names),) * len(names) if names else ()
    return widths if sum(widths) == n else ()


def describe(directory: Path, config: Any) -> BaseModel:
    """Return what the manifest says of the model."""
    generation = _read_json(directory / "generation_config.json")
    stops = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    stop_ids = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
    pad = generation.get("pad_token_id", getattr(config, "pad_token_id", None))
    return BaseModel(
        name=directory.resolve().name,
        architecture=config.architectures[0],
        fingerprint=fingerprint(directory),
        stop_token_ids=stop_ids,
        pad_token_id=pad if pad is not None else next(iter(stop_ids), 0),
        head_dim=head_dim(config),
    )


def fingerprint(directory: Path) -> str:
    """Return the SHA-256 over config.json and the name, dtype and shape of every weight."""
    config = _read_json(directory / "config.json")
    for name in _VOLATILE_FIELDS:
        config.pop(name, None)
    content = json.dumps([config, sorted(_weight_headers(directory))], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _weight_headers(directory: Path) -> Iterator[tuple[str, str, list[int]]]:
    for path in directory.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                weight = file.get_slice(name)
                yield name, str(weight.get_dtype()), list(weight.get_shape())


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
