"""Where the positions of a model begin, and how many tokens they are enough for."""

from typing import Any

import torch

from trt_lora.builder.config_fields import POSITIONS


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


def usable_positions(model: Any) -> int | None:
    """Return how many tokens a model can take; None if its config sets no limit.

    Args:
        model: a `PreTrainedModel`, on any device.
    """
    text = model.config.get_text_config()
    found = (getattr(text, name, None) for name in POSITIONS)
    stated = next((count for count in found if isinstance(count, int) and count > 0), None)
    return None if stated is None else max(stated - first_position(model), 1)
