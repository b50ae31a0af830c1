"""DeepSeek-V2's rotary embedding in real arithmetic, since ONNX has no complex numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2


@contextmanager
def real_rope() -> Iterator[None]:
    """Replace what would be complex inside the block."""
    with (
        patch.object(modeling_deepseek_v2.DeepseekV2RotaryEmbedding, "forward", _rotations),
        patch.object(modeling_deepseek_v2, "apply_rotary_emb", _rotate_both),
    ):
        yield


def _rotations(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Cosine and sine [batch, s, d / 2, 2] of position_ids [batch, s]; `x` is unused."""
    angles: torch.Tensor = position_ids[..., None].float() * self.inv_freq.float()
    scale: float = self.attention_scaling
    return torch.stack((torch.cos(angles), torch.sin(angles)), dim=-1) * scale


def _rotate_both(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys [batch, heads, s, d]; the names are transformers'."""
    return _rotate(xq, freqs_cis), _rotate(xk, freqs_cis)


def _rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    cos, sin = rotations.unsqueeze(1).unbind(-1)
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(rotated, dim=-1).flatten(-2).type_as(x)
