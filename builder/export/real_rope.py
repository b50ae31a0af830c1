"""Complex rotary embeddings in real arithmetic, since ONNX has no complex numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2


@contextmanager
def real_rope() -> Iterator[None]:
    """Replace inside the block what would be complex in DeepSeek-V2."""
    with (
        patch.object(modeling_deepseek_v2.DeepseekV2RotaryEmbedding, "forward", _rotations),
        patch.object(modeling_deepseek_v2, "apply_rotary_emb", _rotate_both),
    ):
        yield


@contextmanager
def given_rope(pos_embed: Any, *tables: torch.Tensor) -> Iterator[None]:
    """Make Qwen-Image rotate by tables of cosine and sine [s, d / 2, 2] inside the block.

    Args:
        pos_embed: the model's, which would compute those of picture and text.
        tables: these two.
    """
    from diffusers.models.transformers import transformer_qwenimage as qwen

    def given(*_: object, **__: object) -> tuple[torch.Tensor, ...]:
        return tables

    def rotate(x: torch.Tensor, rotations: torch.Tensor, use_real: bool) -> torch.Tensor:
        return _rotate(x, rotations)

    with (
        patch.object(pos_embed, "forward", given),
        patch.object(qwen, "apply_rotary_emb_qwen", rotate),
        # Finds the lengths of texts too, which nobody reads, and fixes that of the example.
        patch.object(qwen, "compute_text_seq_len_from_mask", _length_and_mask),
    ):
        yield


def _length_and_mask(text: torch.Tensor, mask: torch.Tensor) -> tuple[int, None, torch.Tensor]:
    return text.shape[1], None, mask.bool()


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
    """Rotate x [.., d] by rotations [.., d / 2, 2], whose axis 1 is missing."""
    cos, sin = rotations.unsqueeze(1).unbind(-1)
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(rotated, dim=-1).flatten(-2).type_as(x)
