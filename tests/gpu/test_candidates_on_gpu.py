"""The candidate kernels on a GPU: the tokens of a sort, the totals of float64."""

import pytest
from kernels.calls import DTYPES
from kernels.candidate_call import CandidateCall, Found, random_call, run_between_guards
from kernels.guarded_buffer import CudaMemory

from trt_lora.plugins.kernels.candidates import launch_candidates

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def run(call: CandidateCall, shift: int = 0) -> Found:
    """What the GPU leaves."""
    return run_between_guards(
        call,
        CudaMemory(),
        lambda addresses, _: launch_candidates(call.shape, addresses, 0),
        shift=shift,
    )


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (3, 2049), (8, 49152), (64, 128256)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_candidates_agree_with_float64_and_repeat_their_bits(
    dtype: str, rows: int, vocabulary: int, step: float
) -> None:
    call = random_call(rows, vocabulary, dtype, step=step)
    found = run(call, shift=call.logits.itemsize)
    assert call.mistakes(found) == []
    assert run(call, shift=call.logits.itemsize).bits() == found.bits()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_is_reported(value: float) -> None:
    call = random_call(3, 5000, "float16")
    call.logits[1, 4321] = value
    assert call.mistakes(run(call)) == []
