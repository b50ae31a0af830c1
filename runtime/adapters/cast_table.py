"""Lookup table for casts between 16-bit floats: all 65536 values, for one scale."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array, Float32, storage_dtype

_SIGN = 1 << 15
_LOST = 1 << 31


@dataclass(frozen=True)
class CastTable:
    """Casts of every float of one 16-bit dtype to another, times a scale."""

    entries: npt.NDArray[np.uint32]  # [65536]: the new bits, above them the rank of the error, and
    # in the highest bit whether it became zero and was not
    errors: Float32  # [32768]: by rank, ascending; not finite where the result is not

    def add_changes(self, entries: npt.NDArray[np.uint32], rank: int, lost: int) -> tuple[int, int]:
        """Return the largest rank, and how many became zero and were not, with those so far."""
        largest = int(entries.max(initial=0))
        if largest >= _LOST:
            lost += int(np.count_nonzero(entries >= _LOST))
            largest = int((entries & np.uint32(_LOST - 1)).max())
        return max(rank, largest >> 16), lost


def cast_table(source: str, target: str, scale: float) -> CastTable:
    """Cast all floats of the dtype `source`, times `scale` in float32, to `target`."""
    stored, errors, lost = _cast_positive(source, target, scale)
    by_error = np.argsort(errors, kind="stable")  # NaN comes last; many are equal
    entries = np.empty(_SIGN, np.uint32)
    entries[by_error] = np.arange(_SIGN, dtype=np.uint32) << 16
    entries |= stored.view(np.uint16)
    entries[lost] |= np.uint32(_LOST)
    # negative ones differ in the sign alone
    both = np.concatenate([entries, entries ^ np.uint32(_SIGN)])
    return CastTable(both, errors[by_error])


@np.errstate(over="ignore", invalid="ignore")
def _cast_positive(
    source: str, target: str, scale: float
) -> tuple[Array, Float32, npt.NDArray[np.intp]]:
    """Cast all positive floats; return results, errors, and indices of those flushed to zero."""
    exact = np.arange(_SIGN, dtype=np.uint16).view(storage_dtype(source)).astype(np.float32)
    exact *= np.float32(scale)
    stored = exact.astype(storage_dtype(target))
    found = stored.astype(np.float32)
    lost = np.flatnonzero((exact != 0) & (found == 0))
    return stored, np.abs(exact - found), lost
