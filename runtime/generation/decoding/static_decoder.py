"""Prefill and decode with a static KV cache: rows have lengths of their own."""

import numpy as np

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import Executor, PreparesRuns
from trt_lora.runtime.generation.decoding.decode_steps import DecodeSteps
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.static_inputs import static_token_inputs
from trt_lora.runtime.generation.decoding.step_inputs import LOGITS, Ids
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, tensor_from_numpy


class StaticDecoder:
    """Rows of a cache on an engine."""

    def __init__(self, executor: Executor, tensor_map: TensorMap, rows: int) -> None:
        """Allocate an empty cache.

        Args:
            executor: a running engine whose cache is static.
            tensor_map: holds the engine's LoRA bindings; they are copied into a map of its own.
            rows: sequences at a time, most.
        """
        self._executor = executor
        self.adapter = TensorMap(tensor_map)  # another object after every change
        self._map = TensorMap(tensor_map)
        self.cache = KVCache(executor.manifest, executor.memory, rows)
        self._steps: DecodeSteps | None = None
        if isinstance(executor, PreparesRuns):
            self._steps = DecodeSteps(executor, executor.memory, self.cache)

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings from the next run on; what is in the cache stays."""
        self.adapter = TensorMap(self.adapter | tensor_map)
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
        if min(count, width) > 1 and lengths.any() and self._executor.memory.device == HOST:
            return self._row_by_row(ids, first, new, kept)
        tokens = static_token_inputs(ids, lengths, kept, self._bound(lengths, width))
        self._map.update({name: tensor_from_numpy(array) for name, array in tokens.items()})
        self._map.update(self.cache.views(first, count))
        logits = self._executor.execute(self._map)[LOGITS]
        lengths += new  # in place
        return logits

    def _row_by_row(self, ids: Ids, first: int, new: Ids, kept: Ids) -> Tensor:
        """As `execute`: ONNX Runtime's attention takes several rows of several tokens when new."""
        width, logits = ids.shape[1], dict[int, Logits]()
        for row in range(len(ids)):
            mine = np.flatnonzero(kept // width == row)
            places = kept[mine] % width if mine.size else np.zeros(1, np.int64)
            at = slice(row, row + 1)
            found = self.execute(ids[at], first=first + row, new=new[at], kept=places).numpy()
            logits |= dict(zip(mine.tolist(), found, strict=False))  # of a row without any, nothing
        return tensor_from_numpy(np.stack([logits[place] for place in range(kept.size)]))

    def decode(self, tokens: Ids, *, rows: Ids | None = None) -> Logits:
        """Append a token to each of the first rows; run the engine once.

        Args:
            tokens: [n].
            rows: those of the n that get their token and logits [k]; all by default. The others
                stay as they were.

        Returns:
            Logits [k, vocab] as float32, until the next call.

        Raises:
            TensorError: a row would be longer than the engine allows.
        """
        count = len(tokens)
        new = np.ones(count, np.int64)
        if rows is not None:
            new[:] = 0
            new[rows] = 1
        if self._steps is None:
            return self.run(tokens[:, None], new=new, kept=rows)
        self.cache.check_room(0, np.ones(self._steps.rows(count), np.int64))
        logits = self._steps.run(tokens, self.adapter)
        self.cache.lengths[:count] += new
        return logits if rows is None else logits[rows]

    def _bound(self, lengths: Ids, width: int) -> int:
        """Positions looked at: as few as needed on the host, few different ones on a GPU."""
        needed = int(lengths.max()) + width
        if self._executor.memory.device == HOST:
            return needed
        if width == 1:  # what the decode profile is built for
            return self.cache.max_len
        return min(1 << (needed - 1).bit_length(), self.cache.max_len)
