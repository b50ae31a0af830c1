"""Load a base model, and describe it for the manifest."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.formats.stored_linear import Weight
from trt_lora.builder.checkpoint.loaded_weights import (
    check_finite,
    check_report,
    check_ties,
    check_values,
)
from trt_lora.builder.checkpoint.model_classes import auto_class
from trt_lora.builder.checkpoint.model_directory import NEXT_STEP
from trt_lora.builder.checkpoint.stored_linears import dense, float_tensors, stored_linears
from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.contract.modules import parts_of
from trt_lora.runtime.files.hub_cache import model_name
from trt_lora.runtime.manifest import BaseModel

# They change with the release that saved the config, not with the model.
_VOLATILE_FIELDS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


def load_model(
    checkpoint: Checkpoint, dtype: str, linears: Mapping[str, Weight] | None = None
) -> Any:
    """Return the model in `dtype` on the CPU, in evaluation mode, with the file's weights.

    Args:
        checkpoint: on disk.
        dtype: of the model.
        linears: weights [n, k] that take the place of the checkpoint's, by its linears' paths, all
            of those in codes among them; None: the values of those are read here.

    Raises:
        ModelError: weights are missing, unknown, damaged, in codes of which the checkpoint says
            nothing, or not finite in `dtype`.
    """
    directory, stored = checkpoint.directory, stored_linears(checkpoint)
    if linears is None and stored is not None:
        linears = {path: dense(weight) for path, weight in stored.weights()}
    given = {f"{path}.weight": weight for path, weight in (linears or {}).items()}
    tensors: Iterable[tuple[Path, str, torch.Tensor]]
    tensors = float_tensors(checkpoint, lambda name: name not in given)
    if not given and checkpoint.gguf is None:
        model, report = _from_files(checkpoint, dtype)
    else:
        values = [(directory, name, dense(weight)) for name, weight in given.items()]
        tensors = [*tensors, *values]
        model, report = _from_tensors(directory, dtype, {name: t for _, name, t in tensors})
    check_report(directory, report)
    check_ties(directory, model)
    check_finite(directory, model)
    check_values(tensors, model)
    return model.eval()


def _from_files(checkpoint: Checkpoint, dtype: str) -> tuple[Any, Mapping[str, Any]]:
    directory, kind = checkpoint.directory, auto_class(checkpoint.fields.get("model_type", ""))
    with one_line(f"{directory} cannot be loaded", NEXT_STEP), suppress_output():
        loaded: tuple[Any, Mapping[str, Any]] = kind.from_pretrained(
            directory, trust_remote_code=False, **_options(dtype)
        )
    return loaded


def _from_tensors(
    directory: Path, dtype: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[Any, Mapping[str, Any]]:
    with one_line(f"{directory} cannot be loaded", NEXT_STEP), suppress_output():
        config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        vars(config).pop("quantization_config", None)  # the weights are floats from here on
        with torch.device("meta"):
            kind: Any = type(auto_class(config.model_type).from_config(config))
        loaded: tuple[Any, Mapping[str, Any]] = kind.from_pretrained(
            None, config=config, state_dict={**tensors}, **_options(dtype)
        )
    return loaded


def _options(dtype: str) -> dict[str, Any]:
    return {
        "dtype": getattr(torch, dtype),
        "attn_implementation": ATTENTION,
        "ignore_mismatched_sizes": True,  # they are refused, by name
        "output_loading_info": True,
    }


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


def describe(checkpoint: Checkpoint, config: Any) -> BaseModel:
    """Return what the manifest says of the model."""
    return BaseModel(
        name=model_name(checkpoint.directory.resolve()),
        architecture=config.architectures[0],
        fingerprint=fingerprint(checkpoint),
        stop_token_ids=checkpoint.stop_token_ids(config),
        pad_token_id=checkpoint.pad_token_id(config),
        head_dim=head_dim(config),
        scales_x=checkpoint.quantisation is not None and checkpoint.quantisation.scales_x,
    )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 over config.json and the name, dtype and shape of every weight.

    Raises:
        ModelError: the files are missing or damaged.
    """
    fields = checkpoint.fields
    config = {name: value for name, value in fields.items() if name not in _VOLATILE_FIELDS}
    weights = sorted((w.name, w.dtype, list(w.shape)) for w in checkpoint.weights)
    content = json.dumps([config, weights], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
