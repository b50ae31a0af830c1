"""SHA-256 of base weights by their values: those of an engine, and copies in PEFT's files.

PEFT saves embeddings and output head beside an adapter that targets one of them, trained or not, in
the dtype that the model was loaded in. So a hash is of float32 values: those of the checkpoint, and
what they become in each 16-bit dtype that rounds them.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from trt_lora.runtime.memory.dtypes import Array, Float32

BLOCK = 1 << 20  # values in memory at a time
EXACT = "float32"  # the key of the checkpoint's own values


@dataclass(frozen=True)
class BaseWeight:
    """A weight of the base model."""

    shape: tuple[int, ...]
    sha256: Mapping[str, str]  # by EXACT, and by the dtypes that round its values


@dataclass(frozen=True, eq=False)
class BaseCopy:
    """A base weight in an adapter's file, which PEFT loads in the place of the model's own."""

    path: str  # of the weight in the model, such as lm_head.weight
    shape: tuple[int, ...]
    blocks: Callable[[int], Iterable[Array]]  # most values of a block -> [values], row-major

    @cached_property
    def sha256(self) -> str:
        """Hash of the values, which are read the first time.

        Raises:
            AdapterError: the file changed since the adapter was opened.
        """
        return values_sha256(block.astype("float32", copy=False) for block in self.blocks(BLOCK))


def values_sha256(blocks: Iterable[Float32]) -> str:
    """Return the SHA-256 of float32 values [n], little-endian, whatever the sizes of the blocks."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block.astype("<f4", copy=False).data)
    return digest.hexdigest()
