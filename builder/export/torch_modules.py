"""What the modules of a torch model tell: its linears, and the position of a first token."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


def module_linears(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every linear of a torch model; a shared module has one path."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            yield path, module


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
