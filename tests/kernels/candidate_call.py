"""One call of the candidate kernels between guards, and what it should leave, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kernels.guarded_buffer import Guarded, Memory

from trt_lora.plugins.kernels.candidates import (
    KEPT,
    CandidateBuffers,
    LogitsShape,
    candidates_workspace_bytes,
)
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

TOLERANCE = 1e-12  # of a total: some thousand additions and exponentials in float64


@dataclass(frozen=True)
class Found:
    """What the kernels left: see `CandidateBuffers`."""

    tokens: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    totals: npt.NDArray[np.float64]
    not_finite: npt.NDArray[np.int32]
    greedy: npt.NDArray[np.int64]

    def bits(self) -> bytes:
        """All of it."""
        arrays = (self.tokens, self.values, self.totals, self.not_finite, self.greedy)
        return b"".join(array.tobytes() for array in arrays)


@dataclass(frozen=True)
class CandidateCall:
    """Logits [rows, vocabulary] as stored, and temperatures [rows]."""

    logits: Array
    temperatures: npt.NDArray[np.float64]
    dtype: str

    @property
    def shape(self) -> LogitsShape:
        """The shape as the kernels take it."""
        rows, vocabulary = self.logits.shape
        return LogitsShape(rows, vocabulary, self.dtype)

    def mistakes(self, found: Found) -> list[str]:
        """What is wrong; of a row with a logit that is not finite, only its flag can be."""
        finite = np.asarray(np.isfinite(self.logits.astype(np.float32)).all(axis=1))
        tokens, values, totals = self._expected(finite)
        wrong = {
            "tokens": np.any(found.tokens[finite] != tokens),
            "values": np.any(found.values[finite] != values),
            "totals": not np.all(abs(found.totals[finite] / totals - 1) < TOLERANCE),
            "flags": np.any(found.not_finite != ~finite),
            "greedy": np.any(found.greedy[finite] != tokens[:, 0])
            or found.greedy.min() < 0
            or found.greedy.max() >= self.shape.vocabulary,
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]

    def _expected(self, rows: npt.NDArray[np.bool_]) -> tuple[Array, Array, Array]:
        logits = self.logits[rows].astype(np.float64)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :KEPT]
        missing = ((0, 0), (0, KEPT - order.shape[1]))
        values = np.take_along_axis(logits, order, axis=1)
        temperatures = np.where(self.temperatures == 0, 1, self.temperatures)[rows, None]
        with np.errstate(over="ignore"):
            totals = np.exp((logits - values[:, :1]) / temperatures).sum(axis=1)
        return (
            np.pad(order, missing, constant_values=-1),
            np.pad(values, missing, constant_values=-np.inf),
            totals,
        )


def run_between_guards(
    call: CandidateCall,
    memory: Memory,
    launch: Callable[[CandidateBuffers, list[Guarded]], None],
    *,
    shift: int = 0,
) -> Found:
    """Return what a launch leaves.

    Args:
        call: the inputs.
        memory: where they are to be.
        launch: given the addresses, and the buffers that may be touched.
        shift: bytes by which the logits miss their alignment.

    Raises:
        AssertionError: a guard or an input has changed.
    """
    rows, written = call.shape.rows, rows_written(call.shape)
    buffers = [
        Guarded(memory, call.logits.nbytes, call.logits, shift),
        Guarded(memory, rows * 8, call.temperatures),
        *(Guarded(memory, nbytes) for nbytes in written),
    ]
    launch(CandidateBuffers(*(each.address for each in buffers)), buffers)
    assert all(each.is_intact() for each in buffers), "memory that is no output was written"
    tokens, values, totals, flags, _, greedy = (each.read() for each in buffers[2:])
    found = Found(
        tokens.view(np.int32).reshape(rows, KEPT),
        values.view(np.float32).reshape(rows, KEPT),
        totals.view(np.float64),
        flags.view(np.int32),
        greedy.view(np.int64),
    )
    for each in buffers:
        each.free()
    return found


def rows_written(shape: LogitsShape) -> tuple[int, ...]:
    """Return the bytes of tokens, values, totals, flags, workspace and greedy tokens."""
    rows, workspace = shape.rows, candidates_workspace_bytes(shape)
    return rows * KEPT * 4, rows * KEPT * 4, rows * 8, rows * 4, workspace, rows * 8


def random_call(
    rows: int, vocabulary: int, dtype: str, *, spread: float = 4.0, step: float = 0.0
) -> CandidateCall:
    """Return normally distributed logits; as multiples of a step, many are equal."""
    rng = np.random.default_rng((rows, vocabulary))
    logits = rng.normal(0, spread, (rows, vocabulary))
    if step:
        logits = np.round(logits / step) * step
    temperatures = rng.choice([0.0, 1e-3, 0.7, 1.0, 20.0], rows)
    return CandidateCall(logits.astype(storage_dtype(dtype)), temperatures, dtype)
