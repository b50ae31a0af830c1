"""Mixes of adapters among the rows of a batch: the slot that each row takes."""

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.contract.slots import BASE_SLOT

MIXES = ("identical", "distinct", "uniform", "Zipf", "one base row among many", "all base")


def mix(name: str, rows: int, slots: int) -> npt.NDArray[np.int32]:
    """Return the slot of each row, the same in every run.

    Args:
        name: one of `MIXES`; with fewer slots than rows, rows of "distinct" share them evenly.
        rows: of the batch.
        slots: that there are; "one base row among many" needs two.
    """
    order = np.arange(rows)
    shares = 1 / np.arange(1, slots + 1)  # of "Zipf": the first slot has most rows
    random = np.random.default_rng((rows, slots, MIXES.index(name)))
    found: dict[str, npt.ArrayLike] = {
        "identical": [slots - 1] * rows,
        "distinct": random.permutation(order % slots),
        "uniform": random.integers(0, slots, rows),
        "Zipf": random.choice(slots, rows, p=shares / shares.sum()),
        "one base row among many": np.where(order == rows // 2, BASE_SLOT, order % 2),
        "all base": [BASE_SLOT] * rows,
    }
    return np.asarray(found[name], np.int32)
