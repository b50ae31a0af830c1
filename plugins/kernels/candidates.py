"""The most probable tokens of each row of logits, found on the GPU: what sampling looks at.

Two launches for a call, `best_of_parts` and `best_of_rows` of candidates.cu. What they leave is
`trt_lora.runtime.engines.topk.Candidates`, in which `draw` finds each row's token.
"""

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from trt_lora.plugins.errors import ConfigError, TensorError
from trt_lora.plugins.kernels.constants import THREADS, constant_declarations
from trt_lora.plugins.kernels.launch_plan import ITEM_BYTES, Launch
from trt_lora.plugins.kernels.launcher import enqueue, load_kernels
from trt_lora.plugins.kernels.nvrtc import ELEMENTS, cached_code

KEPT = 256  # candidates of a row
_LISTS = 8  # of KEPT tokens, that a CTA sorts at once
_PART = KEPT * _LISTS  # tokens of a CTA
_KEY_BYTES, _SUM_BYTES = 8, 8
_SHARED_BYTES = _PART * _KEY_BYTES + THREADS * _SUM_BYTES
_MOST_ROWS = 65535  # of a grid's second axis

# Every kernel, and the template that is its body.
CANDIDATE_KERNELS = {
    f"best_of_parts_{dtype}": f"best_of_parts<{element}>" for dtype, element in ELEMENTS.items()
} | {"best_of_rows": "best_of_row"}


@dataclass(frozen=True)
class LogitsShape:
    """Logits [rows, vocabulary] in row-major order, of dtype float16, bfloat16 or float32."""

    rows: int
    vocabulary: int
    dtype: str

    @property
    def parts(self) -> int:
        """CTAs that share a row."""
        return math.ceil(self.vocabulary / _PART)


class CandidateBuffers(NamedTuple):
    """The device addresses of one call.

    In a row with `not_finite` a logit is NaN or infinite, and nothing else that is written counts.
    Where the vocabulary is smaller than `KEPT`, tokens of -1 and logits of -inf follow it. A logit
    of -0 comes out as 0.
    """

    logits: int  # [rows, vocabulary], read
    temperatures: int  # [rows] float64, read; 0 (greedy) counts as 1
    tokens: int  # [rows, KEPT] int32, written: greatest logit first, of equal ones the lower id
    values: int  # [rows, KEPT] float32, written: their logits
    totals: int  # [rows] float64, written: sum of exp((logit - greatest) / temperature), of all
    not_finite: int  # [rows] int32, written: 0 or 1
    workspace: int  # `candidates_workspace_bytes`, aligned to 8 bytes; what is in it means nothing
    # [rows] int64, written: each row's first token, as an engine's next input; 0: not written. Also
    # where a logit is not finite it is a token of the vocabulary.
    greedy: int = 0


class KernelRows(ctypes.Structure):
    """`Rows` of candidates.cu: the one argument of both kernels."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("not_finite", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("greedy", ctypes.c_void_p),
        ("vocabulary", ctypes.c_int),
        ("parts", ctypes.c_int),
    )


def launch_candidates(shape: LogitsShape, buffers: CandidateBuffers, stream: int) -> None:
    """Enqueue the search for each row's candidates on `stream`, a CUDA stream handle.

    It may be captured, once a call of that dtype has compiled and loaded the kernels; the driver
    copies the argument. The same logits and temperatures give the same bits, whatever the other
    rows are.

    Raises:
        BackendError: there is no GPU, or CUDA refused; with NVIDIA's own explanation.
        ConfigError: the dtype is unknown, or the rows are too many.
        TensorError: there is no row or no token.
    """
    rows = kernel_rows(shape, buffers)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(rows))
    functions = _functions(shape.dtype)
    for launch in plan_candidates(shape):
        enqueue(functions[launch.kernel], launch, ctypes.addressof(arguments), stream)


def plan_candidates(shape: LogitsShape) -> tuple[Launch, Launch]:
    """Return the launches of one call, in order.

    Raises:
        ConfigError: the dtype is unknown, or the rows are too many.
        TensorError: there is no row or no token.
    """
    _check(shape)
    return (
        _launch(f"best_of_parts_{shape.dtype}", shape.parts, shape.rows),
        _launch("best_of_rows", shape.rows, 1),
    )


def candidates_workspace_bytes(shape: LogitsShape) -> int:
    """Return the workspace of a call, in bytes; one of fewer rows needs no more."""
    return shape.rows * shape.parts * (KEPT * _KEY_BYTES + _SUM_BYTES)


def kernel_rows(shape: LogitsShape, buffers: CandidateBuffers) -> KernelRows:
    """Return the kernels' argument; the workspace is the keys, and behind them the sums."""
    *read_and_written, keys, greedy = buffers
    sums = keys + shape.rows * shape.parts * KEPT * _KEY_BYTES
    return KernelRows(*read_and_written, keys, sums, greedy, shape.vocabulary, shape.parts)


def candidate_constants() -> str:
    """Return the constants in C++, to stand before the text of candidates.cu."""
    sizes = f"constexpr int KEPT = {KEPT};\nconstexpr int LISTS = {_LISTS};\n"
    return constant_declarations() + sizes


def candidates_source() -> str:
    """Return the templates in CUDA C++ that includes no header."""
    folder = files("trt_lora.plugins.kernels")
    texts = (folder.joinpath(name).read_text() for name in ("device.cuh", "candidates.cu"))
    return "".join((candidate_constants(), *texts))


def candidates_entry_point(kernel: str) -> str:
    """Return the C++ that makes its template a kernel of that name."""
    return (
        'extern "C" __global__ void __launch_bounds__(THREADS, 4) '
        f"{kernel}(const __grid_constant__ Rows rows) {{ {CANDIDATE_KERNELS[kernel]}(rows); }}\n"
    )


def compile_candidates(arch: str, kernels: Sequence[str]) -> bytes:
    """Return kernels as PTX, from the disk if already there.

    Raises:
        BackendError: NVRTC is missing, or refused the source; with its own log.
    """
    return cached_code(arch, candidates_source() + "".join(map(candidates_entry_point, kernels)))


@functools.cache
def _functions(dtype: str) -> Mapping[str, Any]:
    """The kernels of a dtype: one PTX for all GPUs, of nothing newer than capability 8.0."""
    names = (f"best_of_parts_{dtype}", "best_of_rows")
    return load_kernels(compile_candidates("compute_80", names), names)


def _launch(kernel: str, width: int, height: int) -> Launch:
    return Launch(
        kernel, (width, height, 1), THREADS, cluster=1, shared_bytes=_SHARED_BYTES, splits=1
    )


def _check(shape: LogitsShape) -> None:
    if shape.dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {shape.dtype!r} is unknown; choose from: {', '.join(ITEM_BYTES)}")
    if shape.rows < 1 or shape.vocabulary < 1:
        raise TensorError(
            f"logits [{shape.rows}, {shape.vocabulary}] hold nothing to choose from; skip the call"
        )
    if shape.rows > _MOST_ROWS:
        raise ConfigError(
            f"{shape.rows} rows of logits are more than the {_MOST_ROWS} of a launch; "
            "make several calls of them"
        )
