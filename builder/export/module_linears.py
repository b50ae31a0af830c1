"""Linears of a torch model."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


def module_linears(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every linear of a torch model; a shared module has one path."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            yield path, module


def untie_linears(model: Any) -> None:
    """Give linears that share a weight their own, in place.

    The exporter makes one node of two that read the same x and weight.
    """
    seen = set[int]()
    for _, linear in module_linears(model):
        if id(linear.weight) in seen:
            linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        seen.add(id(linear.weight))
