"""Maps of heights as pictures: lit from the north-west, coloured by height."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trt_lora.runtime.memory.dtypes import Array

_LIGHT = np.array([-1.0, -1.0, 1.4]) / np.linalg.norm([-1.0, -1.0, 1.4])
_STEEPNESS = 14.0  # so that the model's heights of -1 to 1 rise over a map of 128 points
# Colours between which a height has its own, from deep to high, by what it is above the middle.
_HEIGHTS = (-0.6, -0.3, 0.0, 0.3, 0.6)
_COLOURS = np.array(
    [(66, 108, 122), (112, 148, 110), (170, 166, 118), (184, 152, 124), (240, 238, 234)]
)
_MARGIN, _TEXT = 6, 14  # pixels


def relief(heights: Array) -> Array:
    """Return the picture [h, w, 3] of heights [h, w] above the middle of the land."""
    down, right = np.gradient(heights.astype(np.float64) * _STEEPNESS)
    normals = np.stack([-right, -down, np.ones_like(right)], axis=-1)
    normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
    light = 0.35 + 0.65 * np.clip(normals @ _LIGHT, 0, 1)
    colours = [np.interp(heights, _HEIGHTS, _COLOURS[:, each]) for each in range(3)]
    picture: Array = (np.stack(colours, axis=-1) * light[..., None]).astype(np.uint8)
    return picture


def save_rows(path: Path, rows: Sequence[Sequence[tuple[str, Array]]], width: int) -> None:
    """Write rows of labelled heights as one PNG, each as wide as the page."""
    page = Image.new("RGB", (width, sum(_height(row, width) for row in rows)), "white")
    draw, top = ImageDraw.Draw(page), 0
    for row in rows:
        size = _size(row, width)
        for column, (label, heights) in enumerate(row):
            left = column * (size + _MARGIN)
            picture = Image.fromarray(relief(heights))
            page.paste(picture.resize((size, size), Image.Resampling.BICUBIC), (left, top + _TEXT))
            draw.text((left + 1, top), label, "black")
        top += _height(row, width)
    page.save(path, optimize=True)


def _size(row: Sequence[tuple[str, Array]], width: int) -> int:
    return (width - _MARGIN * (len(row) - 1)) // len(row)


def _height(row: Sequence[tuple[str, Array]], width: int) -> int:
    return _size(row, width) + _TEXT + _MARGIN
