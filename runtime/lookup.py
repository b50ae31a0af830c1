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
    first_lost: int  # the bits of the least positive number that becomes zero,
    lost: int  # and how many do

    def count_lost(self, codes: Array) -> int:
        """Return how many of some floats, given by their bits, become zero and were not."""
        if not self.lost:
            return 0
        above = (codes - np.uint16(self.first_lost)) & np.uint16(_SIGN - 1)
        return int(np.count_nonzero(above < self.lost))


def cast_table(source: str, target: str, scale: float) -> CastTable:
    """Cast all floats of the dtype `source`, times `scale` in float32, to `target`.

    Only the positive ones: their negatives differ in nothing but the sign.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.arange(_SIGN, dtype=np.uint16).view(storage_dtype(source)).astype(np.float32)
        values *= np.float32(scale)
        stored = values.astype(storage_dtype(target))
        found = stored.astype(np.float32)
        errors = np.abs(values - found)
    lost = np.flatnonzero((values != 0) & (found == 0))
    by_error = np.argsort(errors)  # NaN comes last
    entries = np.empty(_SIGN, np.uint32)
    entries[by_error] = np.arange(_SIGN, dtype=np.uint32) << 16
    entries |= stored.view(np.uint16)
    both = np.concatenate([entries, entries ^ _SIGN])
    return CastTable(both, errors[by_error], int(lost[0]) if lost.size else 0, lost.size)
