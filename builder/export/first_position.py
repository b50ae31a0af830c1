"""The position id of a first token."""

from typing import Any

import torch


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
