"""Cast 16-bit floats by table: there are 65536, and each is cast once, whatever the scale."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.dtypes import Array, Float32, storage_dtype

_SIGN = 1 << 15


@dataclass(frozen=True)
class CastTable:
    """What every float of one 16-bit dtype becomes in another, times a scale."""

    entries: npt.NDArray[np.uint32]  # [65536]: the new bits, and above them the rank of the error
    errors: Float32  # [32768]: by rank, ascending; not finite where the result is not
    first_lost: int  # bits of the least positive number that becomes zero; the next do too,
    lost: int  # so many in all

    def count_lost(self, bits: Array, scratch: Array) -> int:
        """Return how many floats, given by their bits, become zero and were not.

        `scratch` is memory like `bits`.
        """
        if not self.lost:
            return 0
        np.subtract(bits, np.uint16(self.first_lost), out=scratch)
        np.bitwise_and(scratch, np.uint16(_SIGN - 1), out=scratch)
        return int(np.count_nonzero(scratch < self.lost))


def cast_table(source: str, target: str, scale: float) -> CastTable:
    """Cast all floats of the dtype `source`, times `scale` in float32, to `target`."""
    stored, errors, lost = _cast_positive(source, target, scale)
    by_error = np.argsort(errors, kind="stable")  # NaN comes last; many are equal
    entries = np.empty(_SIGN, np.uint32)
    entries[by_error] = np.arange(_SIGN, dtype=np.uint32) << 16
    entries |= stored.view(np.uint16)
    both = np.concatenate(
        [entries, entries ^ np.uint32(_SIGN)]
    )  # negative ones differ in the sign alone
    return CastTable(both, errors[by_error], int(lost[0]) if lost.size else 0, lost.size)


@np.errstate(over="ignore", invalid="ignore")
def _cast_positive(
    source: str, target: str, scale: float
) -> tuple[Array, Float32, npt.NDArray[np.intp]]:
    """What positive floats become, the errors, and which become zero and were not."""
    exact = np.arange(_SIGN, dtype=np.uint16).view(storage_dtype(source)).astype(np.float32)
    exact *= np.float32(scale)
    stored = _stored(exact, target)
    found = stored.astype(np.float32)
    lost = np.flatnonzero((exact != 0) & (found == 0))
    return stored, np.abs(exact - found), lost


def _stored(exact: Float32, target: str) -> Array:
    """Cast; numpy takes a hundred times as long for a number that float16 cannot hold."""
    dtype, size = storage_dtype(target), np.abs(exact)
    if target != "float16":
        return exact.astype(dtype)
    inside = (size > 2.0**-26) & (size < 2.0**17)  # what float16 holds, and as much again
    stored = np.copysign(np.where(size < 1, np.float32(0), np.float32(np.inf)), exact).astype(dtype)
    stored[inside] = exact[inside]
    return stored
