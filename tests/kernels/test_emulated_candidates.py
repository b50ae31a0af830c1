"""The candidate kernels' own text on a CPU: the tokens of a sort, the totals of float64."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from kernels.calls import DTYPES
from kernels.candidate_call import CandidateCall, random_call
from kernels.candidate_emulator import run_candidates
from kernels.emulator import compiler

from trt_lora.plugins.kernels.candidates import KEPT
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.topk import Candidates
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import NEEDS_FULL_LOGITS, choose, draw
from trt_lora.runtime.memory.dtypes import storage_dtype

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

VOCABULARIES = (1, 2, 5, 255, 256, 257, 1000, 2047, 2048, 2049, 14337, 16385)


def call_of(values: npt.ArrayLike, dtype: str = "float32", temperature: float = 1) -> CandidateCall:
    """A call of these logits [rows, vocabulary]."""
    logits = np.asarray(values).astype(storage_dtype(dtype))
    return CandidateCall(logits, np.full(len(logits), float(temperature)), dtype)


def row_of(call: CandidateCall, row: int) -> CandidateCall:
    """One row, alone."""
    return CandidateCall(call.logits[[row]], call.temperatures[[row]], call.dtype)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_candidates_of_any_vocabulary_are_found(dtype: str, vocabulary: int, step: float) -> None:
    call = random_call(2, vocabulary, dtype, step=step)
    assert call.mistakes(run_candidates(call, shift=call.logits.itemsize)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates_of_a_real_vocabulary_are_found(dtype: str) -> None:
    call = random_call(1, 49152, dtype)
    assert call.mistakes(run_candidates(call)) == []


@pytest.mark.parametrize("value", [0.0, -3.5, 7.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_logits_the_lowest_ids_are_kept(dtype: str, value: float) -> None:
    found = run_candidates(call_of(np.full((2, 5000), value), dtype))
    assert (found.tokens == np.arange(KEPT)).all()
    assert found.totals.tolist() == [5000, 5000]


def test_zeros_of_either_sign_are_equal() -> None:
    zeros = np.where(np.arange(5000) % 3, -0.0, 0.0)[None]
    assert (run_candidates(call_of(zeros)).tokens == np.arange(KEPT)).all()


@pytest.mark.parametrize("greatest_first", [True, False])
def test_the_best_may_all_lie_in_one_part_or_in_each(greatest_first: bool) -> None:
    rising = np.arange(9000.0)
    scattered = np.random.default_rng(0).permutation(rising)
    for values in (rising, rising[::-1], -rising, scattered):
        call = call_of(values[None, :: -1 if greatest_first else 1])
        assert call.mistakes(run_candidates(call)) == []


@pytest.mark.parametrize("largest", [3.4e38, 6e4, 1e-38, 1e-45])
def test_numbers_at_the_ends_of_the_range_are_sorted_and_added_up(largest: float) -> None:
    logits = np.linspace(-largest, largest, 3000).astype(np.float32)[None]
    assert call_of(logits).mistakes(run_candidates(call_of(logits))) == []


@pytest.mark.parametrize("temperature", [0.0, 1e-308, 1e-3, 1.0, 1e3])
def test_the_total_is_that_of_the_rows_own_temperature(temperature: float) -> None:
    call = random_call(3, 4099, "float32")
    temperatures = np.array([1.0, temperature, 0.5])
    call = replace(call, temperatures=temperatures)
    assert call.mistakes(run_candidates(call)) == []


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 2047, 2499])
def test_a_logit_that_is_no_number_is_reported_for_its_row_alone(
    dtype: str, value: float, at: int
) -> None:
    call = random_call(3, 2500, dtype)
    call.logits[1, at] = value
    found = run_candidates(call)
    assert found.not_finite.tolist() == [0, 1, 0]
    assert call.mistakes(found) == []


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_fed_of_a_row_without_numbers_is_a_token_all_the_same(value: float) -> None:
    found = run_candidates(call_of(np.full((2, 300), value)))
    assert found.not_finite.all()
    assert ((found.greedy >= 0) & (found.greedy < 300)).all()


def test_the_greedy_tokens_are_written_nowhere_without_an_address() -> None:
    call = random_call(2, 300, "float32")
    found = run_candidates(call, is_fed=False)
    assert (found.greedy != found.tokens[:, 0]).all()  # what was there before


def test_a_row_has_the_same_bits_alone_and_in_whichever_order_threads_run() -> None:
    call = random_call(4, 5000, "bfloat16", step=0.25)
    found = run_candidates(call)
    assert found.bits() == run_candidates(call, order=7).bits()
    for row in range(4):
        alone = run_candidates(
            CandidateCall(call.logits[[row]], call.temperatures[[row]], call.dtype)
        )
        assert alone.tokens.tobytes() == found.tokens[[row]].tobytes()
        assert alone.totals.tobytes() == found.totals[[row]].tobytes()


WAYS = [
    SamplingParams(max_tokens=64, temperature=0),
    SamplingParams(max_tokens=64, temperature=0.7, top_k=50, top_p=0.9, seed=0),
    SamplingParams(max_tokens=64, temperature=0.7, top_k=256, seed=0),
    SamplingParams(max_tokens=64, temperature=0.5, top_p=0.95, seed=0),
    SamplingParams(max_tokens=64, temperature=0.5, seed=0),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_drawn_from_them_is_what_the_host_chooses(dtype: str) -> None:
    sampling = WAYS * 5
    temperatures = np.array([params.temperature for params in sampling])
    call = replace(random_call(len(sampling), 3000, dtype), temperatures=temperatures)
    keys = np.random.default_rng(1).integers(2**63, size=len(sampling), dtype=np.uint64)
    found = run_candidates(call)
    tokens = draw(Candidates(found.tokens, found.values, found.totals, 3000), sampling, keys)
    expected = choose(HostTopK(call.logits.astype(np.float32)), sampling, keys)
    decided = tokens != NEEDS_FULL_LOGITS
    assert decided.mean() > 0.9
    assert (tokens[decided] == expected[decided]).all()
