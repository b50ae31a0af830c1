"""Prefill and decode with a static KV cache: rows have lengths of their own."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT
from trt_lora.plugins.contract.step import LOGITS, SOURCE_LENGTHS
from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.decoding.decode_steps import DecodeSteps, Group, RowInput
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import Ids, token_inputs
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, tensor_from_numpy

# Tokens of a row in a piece, about. ONNX Runtime's attention computes what it masks as well: half
# of one piece, but little of many. With fewer than 200 tokens its products are slower.
_PIECE = 256


class _Piece(NamedTuple):
    """Neighbouring tokens of neighbouring rows."""

    rows: slice
    columns: slice

    def places(self, kept: Ids, width: int) -> tuple[Ids, Ids]:
        """Return which of the places [kept] in tokens [n, width] lie here, and where here."""
        row, column = np.divmod(kept, width)
        row, column = row - self.rows.start, column - self.columns.start
        height, length = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        is_mine = (row >= 0) & (row < height) & (column >= 0) & (column < length)
        return np.flatnonzero(is_mine), (row * length + column)[is_mine]


class StaticDecoder:
    """Rows of a cache on an engine."""

    def __init__(self, executor: Executor, tensor_map: TensorMap, rows: int) -> None:
        """Allocate an empty cache.

        Args:
            executor: a running engine whose cache is static.
            tensor_map: holds the engine's LoRA bindings, and nothing else.
            rows: sequences at a time, most.
        """
        self._executor = executor
        self.adapter = tensor_map  # another object after every change
        self._map = TensorMap(tensor_map)
        self._has_source = SOURCE_LENGTHS in executor.input_names
        self.cache = KVCache(executor.manifest, executor.memory, rows)
        self.steps = DecodeSteps(executor, self.cache)

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings, all of them, from the next run on; the cache stays."""
        self.adapter = tensor_map
        self._map.update(tensor_map)

    def run(
        self, ids: Ids, *, first: int = 0, new: Ids | None = None, kept: Ids | None = None
    ) -> Logits:
        """Append tokens to neighbouring rows; run the engine once.

        As `execute`; return logits [kept, vocab] as float32, on the host.
        """
        logits = self.execute(ids, first=first, new=new, kept=kept).numpy()
        return logits.astype(np.float32, copy=False)

    def execute(
        self, ids: Ids, *, first: int = 0, new: Ids | None = None, kept: Ids | None = None
    ) -> Tensor:
        """Append tokens to neighbouring rows; run the engine once.

        Args:
            ids: [n, s], for the rows from `first` on.
            first: the first row.
            new: how many of the s tokens count, by row [n]; the others are padding on the right,
                overwritten by the row's next tokens. All by default. 0 leaves a row as it was.
            kept: places in the flattened ids that get logits [kept]; the last token of each row
                by default.

        Returns:
            Logits [kept, vocab], where the engine leaves them.

        Raises:
            TensorError: a row would be longer than the engine allows, or a place is outside.
        """
        count, width = ids.shape
        new = np.full(count, width, np.int64) if new is None else new
        kept = np.arange(count) * width + np.maximum(new, 1) - 1 if kept is None else kept
        if kept.size == 0 or kept.min() < 0 or kept.max() >= ids.size:
            raise TensorError(f"cannot keep places {kept.tolist()} of {ids.size} tokens")
        self.cache.check_room(first, np.full(count, width, np.int64))
        lengths = self.cache.lengths[first : first + count]
        pieces = self._pieces(count, width, started=bool(lengths.any()))
        if len(pieces) == 1:
            return self._run(ids, first, new, kept)
        before = lengths.copy()
        try:
            return self._in_pieces(pieces, ids, first, new, kept)
        except BaseException:  # an interrupt, too: the next try begins where this did
            lengths[:] = before
            raise

    def _pieces(self, count: int, width: int, *, started: bool) -> Sequence[_Piece]:
        if self._executor.memory.device != HOST or width == 1:
            return [_Piece(slice(0, count), slice(0, width))]
        return _host_pieces(count, width, started=started)

    def _in_pieces(
        self, pieces: Sequence[_Piece], ids: Ids, first: int, new: Ids, kept: Ids
    ) -> Tensor:
        """As `execute`, a run for each piece in which a token counts."""
        found: dict[int, Logits] = {}
        for piece in pieces:
            part = ids[piece.rows, piece.columns]
            counted = np.clip(new[piece.rows] - piece.columns.start, 0, part.shape[1])
            mine, places = piece.places(kept, ids.shape[1])
            if counted.any() or mine.size:
                at = first + piece.rows.start
                logits = self._run(part, at, counted, places, self._slots(piece.rows)).numpy()
                found |= zip(mine.tolist(), logits, strict=True)
        return tensor_from_numpy(np.stack([found[place] for place in range(kept.size)]))

    def _slots(self, rows: slice) -> Tensor | None:
        """The slots of some rows of a run; a single slot is that of all rows."""
        slots = self.adapter.get(LORA_SLOT)
        if slots is None or slots.shape == (1,):
            return slots
        return tensor_from_numpy(slots.storage()[rows])

    def _run(
        self, ids: Ids, first: int, new: Ids, kept: Ids, slots: Tensor | None = None
    ) -> Tensor:
        """As `execute`, in one run; no place need be kept. `slots`: if not the adapter's own."""
        count, width = ids.shape
        lengths = self.cache.lengths[first : first + count]
        tokens = token_inputs(ids, lengths, kept, self._bound(lengths, width))
        if self._has_source:
            tokens[SOURCE_LENGTHS] = self.cache.source_lengths[first : first + count].copy()
        self._map.update({name: tensor_from_numpy(array) for name, array in tokens.items()})
        self._map.update(self.cache.views(first, count))
        if LORA_SLOT in self.adapter:
            self._map[LORA_SLOT] = slots or self.adapter[LORA_SLOT]
        logits = self._executor.execute(self._map)[LOGITS]
        lengths += new  # in place
        return logits

    def decode(self, tokens: Ids, *, first: int = 0, rows: Ids | None = None) -> Logits:
        """Append a token to neighbouring rows; fetch all their logits.

        Args:
            tokens: [n], for the rows from `first` on.
            first: the first row.
            rows: those of the n that get their token and logits [k]; all by default. The others
                stay as they were.

        Returns:
            Logits [k, vocab] as float32, until the next call.

        Raises:
            TensorError: a row would be longer than the engine allows.
        """
        places = range(len(tokens)) if rows is None else rows.tolist()
        slots = self.adapter.get(LORA_SLOT)  # of each row, or of all; none where a device has them
        known = BASE_SLOT if slots is None or slots.device != HOST else slots.storage()
        of_rows = np.broadcast_to(known, len(tokens)).tolist()
        told = {at: RowInput(first + at, int(tokens[at]), 0.0, of_rows[at]) for at in places}
        (found,) = self.steps.run([Group(told, self.adapter)])
        return np.stack(found.topk.logits(range(len(told))))

    def _bound(self, lengths: Ids, width: int) -> int:
        """Positions looked at: as few as needed on the host, few different ones on a GPU."""
        needed = int(lengths.max()) + width
        if self._executor.memory.device == HOST:
            return needed
        if width == 1:  # what the decode profile is built for
            return self.cache.max_len
        return min(1 << (needed - 1).bit_length(), self.cache.max_len)


def _host_pieces(count: int, width: int, *, started: bool) -> list[_Piece]:
    """Return the pieces of tokens [count, width] that ONNX Runtime takes, each row's in order.

    Its attention takes several tokens of several rows only where all of them begin.
    """
    edges = np.linspace(0, width, max(1, round(width / _PIECE)) + 1).round().astype(int).tolist()
    columns = [slice(*edge) for edge in pairwise(edges)]
    together = [] if started else [_Piece(slice(0, count), columns.pop(0))]
    rows = [slice(row, row + 1) for row in range(count)]
    return together + [_Piece(row, part) for row in rows for part in columns]
