"""GPTQ: round a weight column by column, and let what follows make up for each error.

https://arxiv.org/abs/2210.17323, with the scales known beforehand ("static groups") and columns in
the order of falling second moments ("act order"), so that no order has to be stored.
"""

from functools import partial

import torch

from trt_lora.builder.quantising.grid import CodeFormat, Grid, by_rows

_DAMPING = 0.01  # of the mean second moment, added to each: a factorisation needs it
_COLUMNS = 64  # whose errors are collected before they reach the rest
_VALUES = 1 << 24  # of a weight at a time; its rows know nothing of one another


def gptq_codes(weight: torch.Tensor, grid: Grid, moments: torch.Tensor) -> torch.Tensor:
    """Return codes [n, k], as bytes, that make the error of `x @ weight.T` small.

    Args:
        weight: [n, k].
        grid: of the weight.
        moments: second moments of x, float32 [k, k].
    """
    order = moments.diagonal().argsort(descending=True)
    factor = _inverse_factor(moments[order][:, order])
    find = partial(_codes_of_rows, form=grid.format, order=order, factor=factor)
    (codes,) = by_rows(find, weight, grid.scales, grid.zeros, size=_VALUES)
    return codes


def _codes_of_rows(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    form: CodeFormat,
    order: torch.Tensor,
    factor: torch.Tensor,
) -> tuple[torch.Tensor]:
    """Codes [n, k], in the weight's own order, found in another one."""
    scales, zeros = (
        part.repeat_interleave(form.block, 1)[:, order].T.contiguous() for part in (scales, zeros)
    )
    columns = weight.T[order].contiguous()  # a row each, so that one is read at a stretch
    for first in range(0, len(columns), _COLUMNS):
        last = min(first + _COLUMNS, len(columns))
        errors = torch.empty_like(columns[first:last])
        for i in range(first, last):
            codes = _codes(columns[i], scales[i], zeros[i], form.top)
            error = columns[i].sub((codes - zeros[i]) * scales[i]).div_(factor[i, i])
            columns[i] = codes
            columns[i + 1 : last].addr_(factor[i, i + 1 : last], error, alpha=-1)
            errors[i - first] = error
        columns[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    result = torch.empty_like(columns, dtype=torch.uint8)
    result[order] = columns.to(torch.uint8)
    return (result.T.contiguous(),)


def _codes(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, top: int
) -> torch.Tensor:
    divisor = torch.where(scales == 0, 1.0, scales)
    return (values / divisor).round_().add_(zeros).clamp_(0, top)


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped moments' inverse, float32 [k, k]."""
    damped = moments.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1  # of an x that is always 0
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
