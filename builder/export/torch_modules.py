"""What the modules of a torch model tell: its linears, and the position of a first token."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from trt_lora.builder.targets import ROUTER_CLASS
from trt_lora.plugins.contract.modules import EXPERT_PARAMETERS


def lora_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of all that may take LoRA in a torch model: linears, and routers.

    A shared module has one path.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) or _is_router(module):
            yield path, module


def module_linears(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every linear of a torch model that is no router."""
    for path, module in lora_modules(model):
        if not _is_router(module):
            yield path, module


def _is_router(module: Any) -> bool:
    """Whether a module has one matrix [E, h], by which it finds tokens their experts."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith(ROUTER_CLASS) and weight is not None and weight.dim() == 2


def expert_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and weight [E, n, k] of every matrix of all experts of a torch model."""
    for path, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            weights = {name: getattr(module, name, None) for name in EXPERT_PARAMETERS}
            yield from ((f"{path}.{n}", w) for n, w in weights.items() if w is not None)


def weight_shape(linear: Any) -> tuple[int, int]:
    """Return [n, k] of the weight of a linear, however it lies in the module."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, Conv1D) else (rows, columns)


def untie_linears(model: Any) -> None:
    """Give linears that share a weight their own, in place.

    The exporter makes one node of two that read the same x and weight.
    """
    seen = set[int]()
    for _, linear in module_linears(model):
        if id(linear.weight) in seen:
            linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        seen.add(id(linear.weight))


def first_position(model: Any) -> int:
    """Return the position of a first token.

    RoBERTa and its kin begin at padding_idx + 1: the positions up to there are never used.

    Args:
        model: a `PreTrainedModel`, on any device.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
