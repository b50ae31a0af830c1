"""GPTQ against a plain version in float64, and against rounding on what it is for."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trt_lora.builder.quantising import gptq
from trt_lora.builder.quantising.gptq import gptq_codes
from trt_lora.builder.quantising.grid import CodeFormat, Grid, searched_grid

BLOCK, N, K = 16, 7, 96  # more columns than are collected at a time
Float64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def x() -> Float64:
    """Inputs [tokens, K] that depend on one another, of which one is always 0."""
    random = np.random.default_rng(0)
    found = random.normal(size=(400, K)) @ random.normal(size=(K, K)) / K**0.5
    found[:, 5] = 0
    return np.asarray(found * random.uniform(0.1, 3, K))


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(N, K)).astype(np.float32))


@pytest.fixture(scope="module")
def grid(weight: torch.Tensor, x: Float64) -> Grid:
    importance = torch.from_numpy((x**2).mean(0).astype(np.float32))
    return searched_grid(weight, CodeFormat(4, BLOCK, torch.float32), importance)


def moments(x: Float64) -> torch.Tensor:
    return torch.from_numpy((x.T @ x / len(x)).astype(np.float32))


def test_codes_are_those_of_the_definition(weight: torch.Tensor, x: Float64, grid: Grid) -> None:
    found = gptq_codes(weight, grid, moments(x)).numpy()
    expected = by_definition(weight.numpy().astype(np.float64), grid, x.T @ x / len(x))
    assert (found != expected).mean() < 0.02  # of halves that float32 rounds the other way
    assert found.min() >= 0
    assert found.max() <= 15


def test_rows_are_found_a_few_at_a_time(
    weight: torch.Tensor, x: Float64, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, counts, find = gptq_codes(weight, grid, moments(x)), list[int](), gptq._codes_of_rows

    def some(rows: torch.Tensor, *others: torch.Tensor, **how: Any) -> tuple[torch.Tensor]:
        counts.append(len(rows))
        return find(rows, *others, **how)

    monkeypatch.setattr(gptq, "_VALUES", 2 * K)
    monkeypatch.setattr(gptq, "_codes_of_rows", some)
    assert (gptq_codes(weight, grid, moments(x)) != whole).float().mean() < 0.02
    assert counts == [2, 2, 2, 1]


def test_products_are_nearer_than_by_rounding(weight: torch.Tensor, x: Float64, grid: Grid) -> None:
    def error(codes: torch.Tensor) -> float:
        read = grid.coded(codes).dequantised().astype(np.float64)
        return float(np.square(x @ (read - weight.numpy()).T).mean())

    assert error(gptq_codes(weight, grid, moments(x))) < 0.6 * error(grid.codes(weight))


def test_inputs_that_do_not_depend_on_one_another_are_rounded(
    weight: torch.Tensor, grid: Grid
) -> None:
    assert torch.equal(gptq_codes(weight, grid, torch.eye(K)), grid.codes(weight))


def by_definition(weight: Float64, grid: Grid, squares: Float64) -> Float64:
    """The weights that are left are solved for anew after each column: OBQ, in a fixed order."""
    scales, zeros = (
        np.repeat(part.numpy().astype(np.float64), BLOCK, 1) for part in (grid.scales, grid.zeros)
    )
    order = np.argsort(-np.diag(squares), kind="stable")
    damped = squares + np.diag(np.where(np.diag(squares) == 0, 1, 0))
    damped = damped + 0.01 * np.diag(damped).mean() * np.eye(K)
    rest, codes = weight.copy(), np.zeros_like(weight)
    for place, column in enumerate(order):
        values = rest[:, column]
        codes[:, column] = np.clip(np.rint(values / scales[:, column]) + zeros[:, column], 0, 15)
        error = (codes[:, column] - zeros[:, column]) * scales[:, column] - values
        later = order[place + 1 :]
        # Least squares: what the others become where this column is off by `error`.
        shift = -np.linalg.solve(damped[np.ix_(later, later)], damped[later, column])
        rest[:, later] += error[:, None] * shift
    return codes
