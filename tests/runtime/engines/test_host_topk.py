"""The best tokens of logits on the host, and weights by ONNX Runtime and by numpy."""

import numpy as np
import numpy.typing as npt
import pytest

from trt_lora.runtime.engines import host_topk
from trt_lora.runtime.engines.host_topk import (
    HostTopK,
    candidate_weights,
    find_candidates,
    numpy_exp_sums,
    rest_blocks,
)
from trt_lora.runtime.engines.onnxruntime.exp_sums import OnnxRuntimeExpSums
from trt_lora.runtime.engines.topk import NO_TOKEN, Logits
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import choose

VOCABULARIES = [5, 256, 257, 1000, 49_152]


@pytest.fixture(scope="module")
def onnx_exp_sums() -> OnnxRuntimeExpSums:
    return OnnxRuntimeExpSums()


def some_logits(rows: int, vocabulary: int, scale: float = 1.0) -> Logits:
    rng = np.random.default_rng(vocabulary)
    return (rng.standard_normal((rows, vocabulary)) * scale).astype(np.float32)


def exact_sums(values: Logits, bases: Logits) -> npt.NDArray[np.float64]:
    weights = np.exp(values.astype(np.float64) - bases[:, None])
    starts = np.arange(0, values.shape[1], host_topk.BLOCK)
    sums: npt.NDArray[np.float64] = np.add.reduceat(weights, starts, axis=1)
    return sums


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_weights_are_added_up_by_blocks(vocabulary: int, onnx_exp_sums: OnnxRuntimeExpSums) -> None:
    values = some_logits(3, vocabulary, 4.0)
    values[1, ::3] = -np.inf
    bases = values.max(axis=1)
    for exp_sums in (numpy_exp_sums, onnx_exp_sums):
        found = exp_sums(values, bases)
        np.testing.assert_allclose(found, exact_sums(values, bases), rtol=1e-6, atol=1e-30)
        alone = exp_sums(values[1:2], bases[1:2])
        np.testing.assert_array_equal(found[1:2], alone)  # whatever the others are


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0, 1e-300])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_totals_and_the_rest_are_those_of_all_weights(
    vocabulary: int, temperature: float, onnx_exp_sums: OnnxRuntimeExpSums
) -> None:
    logits = some_logits(11, vocabulary, 2.0)  # more rows than are computed at a time
    below = logits.astype(np.longdouble) - logits.max(axis=1, keepdims=True)
    weights = np.exp(below / np.longdouble(temperature or 1))
    for exp_sums in (numpy_exp_sums, onnx_exp_sums):
        found = find_candidates(logits, 7, [temperature] * 11, exp_sums)
        np.testing.assert_allclose(found.totals, weights.sum(axis=1).astype(float), rtol=2e-6)
        assert found.blocks is not None
        np.put_along_axis(weights, found.tokens, 0, axis=1)
        sums = np.add.reduceat(weights, np.arange(0, vocabulary, host_topk.BLOCK), axis=1)
        known = candidate_weights(found, np.full(11, temperature or 1))
        rest = rest_blocks(found.blocks, found.tokens, known)
        np.testing.assert_allclose(rest, sums.astype(float), rtol=2e-6, atol=2e-6)
        np.put_along_axis(weights, found.tokens, known, axis=1)


def test_each_row_has_the_total_that_it_asks_for() -> None:
    logits = some_logits(4, 600)
    found = find_candidates(logits, 20, [None, 0.5, None, 1.0])
    assert np.isnan(found.totals).tolist() == [True, False, True, False]
    for row, temperature in ((1, 0.5), (3, 1.0)):
        alone = find_candidates(logits[[row]], 20, [temperature])
        assert found.totals[row] == alone.totals[0]
        assert found.blocks is not None
        assert alone.blocks is not None
        np.testing.assert_array_equal(found.blocks[row], alone.blocks[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_a_single_value_that_is_no_number_shows(value: float, place: int) -> None:
    logits = some_logits(3, 600)
    logits[1, place] = value
    assert HostTopK(logits).is_finite().tolist() == [True, False, True]


def test_the_first_of_equals_is_the_lower_id_and_of_nothing_none() -> None:
    logits = some_logits(3, 600)
    logits[0, [5, 300]] = 9
    logits[2] = -np.inf
    assert HostTopK(logits).first().tolist() == [5, int(logits[1].argmax()), NO_TOKEN]


def test_a_search_is_made_once_and_some_rows_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, searches = some_logits(4, 600), list[int]()
    original = host_topk.find_candidates

    def counted(*args: object) -> object:
        searches.append(len(args[0]))  # type: ignore[arg-type]
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(host_topk, "find_candidates", counted)
    found = HostTopK(logits)
    found.is_finite()
    found.first()
    assert not searches  # a greedy step searches nothing
    few, many = found.candidates([1, 3], 5, [1.0, 1.0]), found.candidates([1, 3], 256, [1.0, 1.0])
    again = found.candidates([1, 3], 5, [1.0, 1.0])
    assert searches == [2, 2]
    np.testing.assert_array_equal(few.tokens, again.tokens[:, :5])
    np.testing.assert_array_equal(many.tokens, again.tokens)
    selected = found.select([1, 3])
    assert selected.first().tolist() == logits[[1, 3]].argmax(axis=1).tolist()
    np.testing.assert_array_equal(selected.candidates([0, 1], 5, [1.0] * 2).tokens, few.tokens)


@pytest.mark.parametrize("allowed", [3, 300, 2000])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_what_is_forbidden_is_never_drawn_however_little_is_allowed(
    allowed: int, temperature: float, onnx_exp_sums: OnnxRuntimeExpSums
) -> None:
    rng = np.random.default_rng(allowed)
    logits = np.full((1, 20_000), -np.inf, np.float32)
    ids = rng.permutation(20_000)[:allowed]
    logits[0, ids] = rng.normal(0, 5, allowed)
    rows = np.broadcast_to(logits, (500, 20_000))
    keys = rng.integers(1 << 64, size=500, dtype=np.uint64)
    for exp_sums in (numpy_exp_sums, onnx_exp_sums):
        found = HostTopK(np.ascontiguousarray(rows), exp_sums)
        drawn = choose(found, [SamplingParams(temperature=temperature)] * 500, keys)
        assert set(drawn.tolist()) <= set(ids.tolist())
