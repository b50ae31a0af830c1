"""Scales and zeros of blocks, against numpy in float64 and against every range that there is."""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from trt_lora.builder.quantising.grid import (
    CodeFormat,
    Grid,
    nearest_float8,
    nearest_grid,
    searched_grid,
)

BLOCK = 16
FOUR = CodeFormat(4, BLOCK, torch.float32)
EIGHT = CodeFormat(8, BLOCK, torch.float32)
WEIGHT = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 48)).astype(np.float32))


def read(grid: Grid, weight: torch.Tensor) -> npt.NDArray[np.float64]:
    """The weight as its nearest codes have it."""
    return grid.coded(grid.codes(weight)).dequantised().astype(np.float64)


def test_the_largest_magnitude_of_a_block_is_exact_and_all_else_within_half_a_step() -> None:
    grid = nearest_grid(WEIGHT, EIGHT)
    found, blocks = (x.reshape(-1, BLOCK) for x in (read(grid, WEIGHT), WEIGHT.double().numpy()))
    largest = np.abs(blocks).max(-1, keepdims=True)
    errors = np.abs(found - blocks) / (largest / 128)  # in steps
    assert errors[np.abs(blocks) == largest].max() < 1e-4
    # Codes end 127 steps on the other side of zero.
    is_within = np.abs(blocks) < 127 / 128 * largest
    assert errors[is_within].max() < 0.501
    assert errors.max() < 1.01
    assert grid.coded(grid.codes(WEIGHT)).zeros is None


@pytest.mark.parametrize("make", [nearest_grid, lambda w, f: searched_grid(w, f, torch.ones(48))])
@pytest.mark.parametrize("form", [FOUR, EIGHT])
def test_zeros_stay_zeros(make: Callable[..., Grid], form: CodeFormat) -> None:
    weight = torch.zeros(5, 48)
    assert not read(make(weight, form), weight).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_those_of_the_scales_that_are_stored(dtype: torch.dtype) -> None:
    """A scale that is rounded after its codes were found would move every weight."""
    form = CodeFormat(8, BLOCK, dtype)
    for grid in (nearest_grid(WEIGHT, form), searched_grid(WEIGHT, form, torch.ones(48))):
        assert torch.equal(grid.scales, grid.scales.to(dtype).float())
        coded = grid.coded(grid.codes(WEIGHT))
        assert coded.scales.dtype.name == str(dtype).removeprefix("torch.")
        error = np.abs(coded.dequantised().astype(np.float64) - WEIGHT.numpy())
        assert error.max() < 1.1 * float(grid.scales.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats_of_8_bits_are_the_nearest_to_a_row_s_largest(dtype: torch.dtype) -> None:
    weight = torch.cat([WEIGHT, WEIGHT[:1] * 1e-7, WEIGHT[:1] * 0])
    coded = nearest_float8(weight, dtype)
    scales = (np.abs(weight.numpy()).max(1, keepdims=True) / 448).astype(coded.scales.dtype)
    np.testing.assert_array_equal(coded.scales, scales)
    has_scale = scales[:, 0] > 0  # half precision has none so small: zeros, not infinite codes
    assert has_scale.tolist() == [True] * 5 + [dtype == torch.float32, False]
    steps = weight.numpy()[has_scale] / scales[has_scale].astype(np.float32)
    expected = np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(coded.codes[has_scale], expected.view(np.uint8))
    assert not (coded.codes[~has_scale] & 0x7F).any()  # zeros, some below


def test_a_search_finds_the_least_weighted_error_of_its_ranges() -> None:
    importance = torch.from_numpy(np.random.default_rng(1).uniform(0.1, 9, 48).astype(np.float32))
    found = read(searched_grid(WEIGHT, FOUR, importance), WEIGHT)
    for row in range(5):
        for block in range(3):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            values, weights = WEIGHT[row, part].double().numpy(), importance[part].double().numpy()
            error = float((weights * (found[row, part] - values) ** 2).sum())
            assert error == pytest.approx(least_error(values, weights), rel=1e-4)


def least_error(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    """By every range and zero that the search may take, one at a time."""
    low, high = min(values.min(), 0), max(values.max(), 0)
    errors = []
    for step in range(24):
        scale = (high - low) / 15 * (1.05 - 0.5 * step / 24)
        for zero in (np.rint(-low / ((high - low) / 15)), np.clip(np.rint(-low / scale), 0, 15)):
            codes = np.clip(np.rint(values / scale) + zero, 0, 15)
            errors.append((weights * ((codes - zero) * scale - values) ** 2).sum())
    return float(min(errors))


def test_what_matters_more_is_nearer() -> None:
    importance = torch.ones(48)
    importance[0] = 1e6
    both = (torch.ones(48), importance)
    plain, weighted = (read(searched_grid(WEIGHT, FOUR, x), WEIGHT) for x in both)
    errors = [np.abs(found[:, 0] - WEIGHT[:, 0].numpy()).mean() for found in (plain, weighted)]
    assert errors[1] < errors[0] / 3


def test_the_rows_of_a_grid_are_those_of_its_weight() -> None:
    grid = searched_grid(WEIGHT, FOUR, torch.ones(48))
    np.testing.assert_array_equal(read(grid.rows(2, 4), WEIGHT[2:4]), read(grid, WEIGHT)[2:4])


SIGNED = replace(FOUR, is_signed=True)


@pytest.mark.parametrize("form", [SIGNED, replace(EIGHT, is_signed=True)])
@pytest.mark.parametrize("make", [nearest_grid, lambda w, f: searched_grid(w, f, torch.ones(48))])
def test_signed_codes_have_one_zero_and_scales_above_it(
    make: Callable[..., Grid], form: CodeFormat
) -> None:
    coded = make(WEIGHT, form).coded(make(WEIGHT, form).codes(WEIGHT))
    assert coded.zeros is None
    assert (coded.scales > 0).all()


def test_the_largest_magnitude_of_a_signed_block_is_on_either_side() -> None:
    form = replace(EIGHT, is_signed=True)
    found, blocks = (
        x.reshape(-1, BLOCK)
        for x in (read(nearest_grid(WEIGHT, form), WEIGHT), WEIGHT.double().numpy())
    )
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    assert (np.abs(found - blocks) / step).max() < 0.501
    largest = np.abs(blocks) == 127 * step
    assert {*np.sign(blocks[largest])} == {-1, 1}


def test_a_search_of_signed_codes_finds_the_least_error_of_its_ranges() -> None:
    importance = torch.from_numpy(np.random.default_rng(1).uniform(0.1, 9, 48).astype(np.float32))
    found = read(searched_grid(WEIGHT, SIGNED, importance), WEIGHT)
    for row in range(5):
        for block in range(3):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            values, weights = WEIGHT[row, part].double().numpy(), importance[part].double().numpy()
            error = float((weights * (found[row, part] - values) ** 2).sum())
            scales = np.abs(values).max() / 7 * (1.05 - 0.5 * np.arange(24)[:, None] / 24)
            codes = np.clip(np.rint(values / scales), -8, 7)
            errors = (weights * (codes * scales - values) ** 2).sum(-1)
            assert error == pytest.approx(errors.min(), rel=1e-4)
