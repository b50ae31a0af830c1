"""Usable number of positions of a model."""

from typing import Any

from trt_lora.builder.checks.config_fields import POSITIONS
from trt_lora.builder.export.first_position import first_position


def usable_positions(model: Any) -> int | None:
    """Return how many tokens a model can take; None if its config sets no limit.

    Args:
        model: a `PreTrainedModel`, on any device.
    """
    text = model.config.get_text_config()
    values = (getattr(text, name, None) for name in POSITIONS)
    stated = next((count for count in values if isinstance(count, int) and count > 0), None)
    return None if stated is None else max(stated - first_position(model), 1)
