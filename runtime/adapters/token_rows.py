"""Rows of an embedding, or of an output head, that were trained: of a few tokens, or of all."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from trt_lora.runtime.adapters.weight import Pair, Weight
from trt_lora.runtime.files.stored_matrix import Block
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, Float32


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Whole rows, in the place of the base model's."""

    ids: tuple[int, ...]  # of the tokens, each once; empty: the module was saved whole
    rows: Weight  # [tokens, width]
    asked_by: str  # what asks for them, and what to do without, for messages

    def in_memory(self) -> "TokenRows":
        """Return the same rows, read, so that their file may change.

        Raises:
            AdapterError: it has changed already.
        """
        values = self.rows.values()
        return replace(self, rows=replace(self.rows, dtype="float32", read=lambda _=None: values))

    def of_embedding(self, blocks: Iterable[Block], size: int) -> Pair:
        """Return A [V, rank] and B [rank, width] that make these rows of the base model's.

        The rank is the number of tokens; of a whole module it is the width.

        Args:
            blocks: of the embedding [V, width]; read when the difference is.
            size: V.
        """
        difference = self._difference(blocks, is_head=False)
        if not self.ids:
            return difference, self._one_hot(difference.shape[1])
        return self._one_hot(size).transposed(), difference

    def of_head(self, blocks: Iterable[Block], size: int) -> Pair:
        """Return A [width, rank] and B [rank, V] of an output head [width, V]."""
        difference = self._difference(blocks, is_head=True).transposed()
        if not self.ids:
            return self._one_hot(difference.shape[0]), difference
        return difference, self._one_hot(size)

    def _one_hot(self, size: int) -> Weight:
        """A row [size] for each token; of a whole module the identity."""
        places = self.ids or range(size)

        def read(buffer: ReadBuffer | None = None) -> Array:
            one_hot = np.zeros((len(places), size), np.float32)
            one_hot[range(len(places)), places] = 1
            return one_hot

        return Weight((), (len(places), size), "float32", read)

    def _difference(self, blocks: Iterable[Block], *, is_head: bool) -> Weight:
        """What the rows differ from the base model's by [tokens, width]."""

        def read(buffer: ReadBuffer | None = None) -> Array:
            base = np.empty(self.rows.shape, np.float32)
            for rows, columns, values in blocks:
                own, across, found = (
                    (columns, rows, values.T) if is_head else (rows, columns, values)
                )
                self._copy(base, own, across, found)
            return np.subtract(self.rows.values(), base, out=base)

        return replace(self.rows, dtype="float32", read=read, scale=1.0, tensor=None)

    def _copy(self, base: Float32, own: slice, across: slice, found: Array) -> None:
        """Copy the rows of these tokens that a block `found` of rows `own` has."""
        if not self.ids:
            base[own, across] = found
        for place, token in enumerate(self.ids):
            if 0 <= (row := token - (own.start or 0)) < len(found):
                base[place, across] = found[row]
