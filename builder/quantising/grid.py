"""Scale and zero of every block of a weight: to the nearest, or searched for the least error."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trt_lora.builder.passes.codes.coded_weight import FLOAT8_MAX, CodedWeight, packed

_CACHED = 1 << 16  # values that are read at a time, so that they stay in a core's cache
_FACTORS = tuple(1.05 - 0.5 * step / 24 for step in range(24))  # of a block's whole range
_FAR = float("inf")


@dataclass(frozen=True)
class CodeFormat:
    """How weights are to be rounded."""

    bits: int  # 4 or 8
    block: int  # values along k that share a scale
    dtype: torch.dtype  # of scales
    is_signed: bool = False  # as a plan has codes: the middle is zero, and scales are above 0

    @property
    def middle(self) -> int:
        """The zero of symmetric codes."""
        return 1 << self.bits - 1

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


@dataclass(frozen=True, eq=False)
class Grid:
    """What the codes of a weight [n, k] mean; scales have values of the format's dtype."""

    format: CodeFormat
    scales: torch.Tensor  # float32 [n, k / block]
    zeros: torch.Tensor  # float32 [n, k / block]

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the nearest codes [n, k], as bytes, of a weight [n, k]."""
        (codes,) = by_rows(self._codes, weight, self.scales, self.zeros)
        return codes

    def _codes(
        self, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> tuple[torch.Tensor]:
        steps = (_blocks(weight, self.format) / _divisor(scales)[..., None]).round_()
        codes = steps.add_(zeros[..., None]).clamp_(0, self.format.top)
        return (codes.reshape(weight.shape).to(torch.uint8),)

    def coded(self, codes: torch.Tensor) -> CodedWeight:
        """Return the weight that codes [n, k] are."""
        form, whole = self.format, codes.numpy()
        zeros = self.zeros.to(torch.uint8).numpy()
        return CodedWeight(
            form.bits,
            form.block,
            packed(whole) if form.bits == 4 else whole,
            _numpy(self.scales.to(form.dtype)),
            None if (zeros == form.middle).all() else zeros,
        )

    def rows(self, first: int, last: int) -> "Grid":
        """Return the grid of some rows of the weight."""
        return Grid(self.format, self.scales[first:last], self.zeros[first:last])


def nearest_grid(weight: torch.Tensor, form: CodeFormat) -> Grid:
    """Return a symmetric grid: the largest magnitude of a block gets code 0; of signed codes, 1.

    Args:
        weight: [n, k].
        form: of the codes.
    """

    def scales_of(weight: torch.Tensor) -> tuple[torch.Tensor]:
        blocks = _blocks(weight, form)
        if form.is_signed:
            return (_rounded(blocks.abs().amax(-1) / (form.middle - 1), form),)
        top = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
        return (_rounded(top / -form.middle, form),)

    (scales,) = by_rows(scales_of, weight)
    return Grid(form, scales, torch.full_like(scales, form.middle))


def nearest_float8(weight: torch.Tensor, dtype: torch.dtype) -> CodedWeight:
    """Return a weight [n, k] as E4M3: the largest magnitude of a row is the largest float.

    Args:
        weight: [n, k].
        dtype: of scales.
    """

    def rows_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = (weight.abs().amax(-1, keepdim=True) / FLOAT8_MAX).to(dtype)
        steps = (weight / _divisor(scales.float())).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
        return steps.mul_(scales != 0).to(torch.float8_e4m3fn), scales

    codes, scales = by_rows(rows_of, weight)
    code_bytes = codes.view(torch.uint8).numpy()
    return CodedWeight(8, weight.shape[1], code_bytes, _numpy(scales), is_float=True)


def searched_grid(weight: torch.Tensor, form: CodeFormat, importance: torch.Tensor) -> Grid:
    """Return the grid with the least squared error of `x @ weight.T`, block by block.

    Ranges of a block are shrunk step by step, each with the zero of the whole range and of its own;
    those of signed codes have their zero in the middle.

    Args:
        weight: [n, k].
        form: of the codes.
        importance: second moments of each x, float32 [k].
    """
    weights = importance.reshape(-1, form.block)
    scales, zeros = by_rows(lambda part: _search(_blocks(part, form), form, weights), weight)
    return Grid(form, scales, zeros)


def by_rows(
    find: Callable[..., tuple[torch.Tensor, ...]],
    weight: torch.Tensor,
    *others: torch.Tensor,
    size: int = _CACHED,
) -> tuple[torch.Tensor, ...]:
    """Return what a function finds of some rows at a time, one below the other.

    Args:
        find: takes rows of all that follows, those of the weight as float32.
        weight: [n, k].
        others: more of [n, ..].
        size: values of the weight that are taken at a time.
    """
    count = max(1, size // weight.shape[1])
    parts = zip(*(torch.split(each, count) for each in (weight, *others)), strict=True)
    found = [find(rows.float(), *more) for rows, *more in parts]
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def _blocks(weight: torch.Tensor, form: CodeFormat) -> torch.Tensor:
    """A weight [n, k] as [n, k / block, block]."""
    return weight.reshape(len(weight), -1, form.block)


def _search(
    blocks: torch.Tensor, form: CodeFormat, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = blocks.amin(-1), blocks.amax(-1).clamp_(min=0)
    if form.is_signed:
        whole = torch.maximum(-low, high) / (form.middle - 1)
        first = torch.full_like(whole, form.middle)
    else:
        whole = (high - low.clamp(max=0)) / form.top
        first = (-low.clamp(max=0) / _divisor(whole)).round_()
    least, scales, zeros = torch.full_like(whole, _FAR), whole, first
    for factor in _FACTORS:
        scale = _rounded(whole * factor, form)
        own = (-low / _divisor(scale)).round_().clamp_(0, form.top)
        for zero in (first,) if form.is_signed else (first, own):
            error = _error(blocks, scale, zero, form.top, importance)
            is_less = error < least
            least = torch.where(is_less, error, least)
            scales, zeros = torch.where(is_less, scale, scales), torch.where(is_less, zero, zeros)
    return scales, zeros


def _error(
    blocks: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    top: int,
    importance: torch.Tensor,
) -> torch.Tensor:
    """Weighted squared error of each block [.., blocks]."""
    zero, step = zero[..., None], scale[..., None]
    steps = (blocks * (1 / _divisor(scale))[..., None]).round_().add_(zero).clamp_(0, top)
    return steps.sub_(zero).mul_(step).sub_(blocks).square_().mul_(importance).sum(-1)


def _rounded(scales: torch.Tensor, form: CodeFormat) -> torch.Tensor:
    return scales.to(form.dtype).float()


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales, but 1 for a block of zeros."""
    return torch.where(scales == 0, 1.0, scales)


def _numpy(scales: torch.Tensor) -> np.ndarray:
    return scales.numpy()
