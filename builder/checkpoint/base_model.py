"""Load a base model, and describe it for the manifest."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from trt_lora.builder.checkpoint.generation_config import pad_token_id, stop_token_ids
from trt_lora.builder.checkpoint.loaded_weights import (
    check_finite,
    check_report,
    check_ties,
    check_values,
)
from trt_lora.builder.checkpoint.model_directory import (
    CONFIG_FILE,
    NEXT_STEP,
    check_directory,
    read_object,
)
from trt_lora.builder.checkpoint.weight_files import check_weights, read_header, weight_files
from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.contract.modules import parts_of
from trt_lora.runtime.files.hub_cache import model_name
from trt_lora.runtime.manifest import BaseModel

# They change with the release that saved the config, not with the model.
_VOLATILE_FIELDS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


def load_model(directory: Path, dtype: str) -> Any:
    """Return the model in `dtype` on the CPU, in evaluation mode, with the file's weights.

    Raises:
        ModelError: weights are missing, unknown, damaged, quantised, or not finite in `dtype`.
    """
    check_directory(directory)
    files = weight_files(directory)
    check_weights(files)
    with one_line(f"{directory} cannot be loaded", NEXT_STEP), suppress_output():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, report = loaded
    check_report(directory, report)
    check_ties(directory, model)
    check_finite(directory, model)
    check_values(files, model)
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
    return BaseModel(
        name=model_name(directory.resolve()),
        architecture=config.architectures[0],
        fingerprint=fingerprint(directory),
        stop_token_ids=stop_token_ids(directory, config),
        pad_token_id=pad_token_id(directory, config),
        head_dim=head_dim(config),
    )


def fingerprint(directory: Path) -> str:
    """Return the SHA-256 over config.json and the name, dtype and shape of every weight.

    Raises:
        ModelError: the files are missing or damaged.
    """
    config = read_object(directory / CONFIG_FILE)
    for name in _VOLATILE_FIELDS:
        config.pop(name, None)
    content = json.dumps([config, sorted(_weight_headers(directory))], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _weight_headers(directory: Path) -> Iterator[tuple[str, str, list[int]]]:
    for path in weight_files(directory):
        for weight in read_header(path):
            yield weight.name, weight.dtype, list(weight.shape)
