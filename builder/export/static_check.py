"""Whether a model answers rows of different lengths as it answers each by itself.

A model may compute masks or positions in a way of its own, from one length for all rows: then it
would be wrong without a word, in a cache of fixed size.
"""

from typing import Any

import torch

from trt_lora.builder.export.attention import set_attention
from trt_lora.builder.export.cache_layout import CacheLayout
from trt_lora.builder.export.static_step import StaticStep

_REFERENCE = "eager"  # transformers' own attention and masks
_MAX_LEN, _FIRST, _THEN = 16, (5, 2), 2  # tokens of a row, of two prompts, and of a step of both
# Of the largest logit. A mask or position that is wrong costs more; rounding in half precision,
# over the layers of a large model, less.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def static_cache_obstacle(model: Any, layouts: tuple[CacheLayout, ...]) -> str:
    """Return why a model cannot take a cache of fixed size; empty if it can.

    Args:
        model: in evaluation mode; its attention is set.
        layouts: of its cache.
    """
    if model.get_output_embeddings() is None:
        return "it names no output head"
    rows = [_tokens(model, count + _THEN, seed) for seed, count in enumerate(_FIRST)]
    try:
        set_attention(model, _REFERENCE)
        expected = torch.stack([model(input_ids=row[None]).logits[0, -_THEN:] for row in rows])
        found = _in_rows(StaticStep(model, layouts, _MAX_LEN), rows)
    except Exception as error:  # whatever a model's own code raises
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    largest = float((found - expected).abs().max() / expected.abs().max())
    if largest < _TOLERANCE[model.dtype]:
        return ""
    return f"rows of different lengths change each other: a logit is off by {largest:.1%}"


def _tokens(model: Any, count: int, seed: int) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator)


def _in_rows(step: StaticStep, rows: list[torch.Tensor]) -> torch.Tensor:
    """Logits [rows, _THEN, vocab] of a step of all rows, after each took its first tokens alone."""
    caches = [
        [tensor.zero_() for tensor in layout.unset(len(rows), _MAX_LEN, step.dtype)]
        for layout in step.layouts
    ]
    for row, (ids, first) in enumerate(zip(rows, _FIRST, strict=True)):
        own = [[tensor[row : row + 1] for tensor in pair] for pair in caches]
        empty, kept = torch.tensor([0]), torch.tensor([first - 1])
        _, *written = step(ids[None, :first], empty, kept, _bound(first), own)
        for index, tensor in enumerate(written):
            caches[index // 2][index % 2][row] = tensor[0]
    new = torch.stack([ids[-_THEN:] for ids in rows])
    lengths, kept = torch.tensor(_FIRST), torch.arange(new.numel())
    logits: torch.Tensor = step(new, lengths, kept, _bound(max(_FIRST) + _THEN), caches)[0]
    return logits.reshape(len(rows), _THEN, -1)


def _bound(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bool)
