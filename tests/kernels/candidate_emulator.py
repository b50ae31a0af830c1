"""The kernels of candidates.cu on a CPU."""

import ctypes
import functools
from collections.abc import Iterable
from importlib.resources import files

from kernels.candidate_call import CandidateCall, Found, run_between_guards
from kernels.emulator import EMULATION, build_texts, emulate, range_of
from kernels.guarded_buffer import Guarded, HostMemory

from trt_lora.plugins.kernels.candidates import (
    CANDIDATE_KERNELS,
    CandidateBuffers,
    candidate_constants,
    candidates_entry_point,
    kernel_rows,
    plan_candidates,
)


def run_candidates(
    call: CandidateCall,
    *,
    shift: int = 0,
    order: int = 0,
    is_fed: bool = True,
    library: ctypes.CDLL | None = None,
) -> Found:
    """Return what the kernels leave.

    Raises:
        EmulationError: a kernel broke a rule of CUDA.
        AssertionError: it wrote where it may not.
    """

    def launch(addresses: CandidateBuffers, buffers: list[Guarded]) -> None:
        addresses = addresses if is_fed else addresses._replace(greedy=0)
        rows, ranges = kernel_rows(call.shape, addresses), [range_of(each) for each in buffers]
        for each in plan_candidates(call.shape):
            emulate(library or load_candidates(), each, rows, ranges, order)

    return run_between_guards(call, HostMemory(), launch, shift=shift)


@functools.cache
def load_candidates() -> ctypes.CDLL:
    """The kernels as they are in the package."""
    return build_candidates(candidates_text(), optimize="-O2")


def candidates_text() -> str:
    """What the GPU is given too: all but device.cuh."""
    folder = files("trt_lora.plugins.kernels")
    return candidate_constants() + folder.joinpath("candidates.cu").read_text()


def build_candidates(
    text: str, kernels: Iterable[str] = CANDIDATE_KERNELS, *, optimize: str = "-O0"
) -> ctypes.CDLL:
    """Compile the kernels of a text, unless they have been compiled before."""
    entries = map(candidates_entry_point, kernels)
    rows = (EMULATION / "rows.cpp").read_text()
    return build_texts((text, *entries, rows), optimize=optimize)
