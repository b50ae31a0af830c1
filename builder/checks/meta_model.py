"""The model without weights, on torch's meta device: its LoRA sites, positions and size."""

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from trt_lora.builder.checkpoint.model_classes import auto_class
from trt_lora.builder.checks.config_fields import POSITIONS
from trt_lora.builder.config import QUANTIZED_BITS, BuildConfig
from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.export.torch_modules import (
    expert_modules,
    first_position,
    lora_modules,
    module_linears,
    weight_shape,
)
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.builder.targets import LeftAlone, SiteList, Targets, check_targets_matched, not_linear
from trt_lora.plugins.contract.sites import Site


def meta_model(model_config: Any, dtype: str) -> Any:
    """Return the model in `dtype` with shapes alone, in evaluation mode; no weight is read.

    Args:
        model_config: transformers' config of the model.
        dtype: of its weights.

    Raises:
        ModelError: transformers cannot make a model of the config.
    """
    failure = f"transformers cannot make a {model_config.architectures[0]} of this config.json"
    with one_line(failure, "correct it"), suppress_output(), torch.device("meta"):
        model = auto_class(model_config.model_type).from_config(
            model_config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )
    return model.eval()


def find_sites(model: Any, targets: Targets) -> SiteList:
    """Return the sites of a `PreTrainedModel`, module by module, and the linears that are none.

    Args:
        model: on any device.
        targets: modules that get LoRA.

    Raises:
        ConfigError: a target matches no linear of the model.
    """
    sites, left_alone, head = [], [], head_path(model)
    for path, module in lora_modules(model):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if reason := not_linear(kind) or targets.refusal(path, head):
            left_alone.append(LeftAlone(path, reason))
        else:
            sites.append(_site(path, module))
    for path, weight in expert_modules(model):
        if reason := targets.refusal(path, head):
            left_alone.append(LeftAlone(path, reason))
        else:
            experts, n, k = weight.shape
            sites.append(Site(path, k, n, _dtype(weight), experts=experts))
    if targets.has_embedding and not model.config.is_encoder_decoder:
        weight = model.get_input_embeddings().weight
        vocabulary, width = weight.shape
        sites.append(Site(embedding_path(model), vocabulary, width, _dtype(weight)))
    check_targets_matched(targets, sites, left_alone)
    return SiteList(tuple(sites), tuple(left_alone))


def usable_positions(model: Any) -> int | None:
    """Return how many tokens a `PreTrainedModel` can take; None if its config sets no limit."""
    text = model.config.get_text_config()
    values = (getattr(text, name, None) for name in POSITIONS)
    stated = next((count for count in values if isinstance(count, int) and count > 0), None)
    return None if stated is None else max(stated - first_position(model), 1)


def weight_bytes(model: Any, config: BuildConfig) -> int:
    """Return the least size of what is exported of a `PreTrainedModel`, tied weights counted once.

    Args:
        model: in the engine's dtype.
        config: says which linears become codes, whose scales are not counted.
    """
    head = model.get_output_embeddings()
    parts = (model,) if model.config.is_encoder_decoder else (model.get_decoder(), head)
    sizes = {id(w): w.nbytes for part in parts if part is not None for w in part.parameters()}
    for _, linear in module_linears(model) if config.quantize != "none" else ():
        bits = QUANTIZED_BITS[config.quantize_head if linear is head else config.quantize]
        if bits and id(linear.weight) in sizes:
            sizes[id(linear.weight)] = linear.weight.numel() * bits // 8
    return sum(sizes.values())


def head_path(model: Any) -> str:
    """Return the path of the module that makes logits; empty if there is none."""
    return _path(model, model.get_output_embeddings())


def embedding_path(model: Any) -> str:
    """Return the path of the module that reads token ids."""
    return _path(model, model.get_input_embeddings())


def is_tied(model: Any) -> bool:
    """Whether the output head has the weight of the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _path(model: Any, wanted: Any) -> str:
    return next((path for path, module in model.named_modules() if module is wanted), "")


def _site(path: str, module: torch.nn.Linear | Conv1D) -> Site:
    n, k = weight_shape(module)
    return Site(path, k, n, _dtype(module.weight))


def _dtype(weight: torch.Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")
