"""Sequences in a KV cache that grows: they begin together, and one that ends goes on as padding."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.growing_decoder import GrowingDecoder
from trt_lora.runtime.generation.decoding.step_inputs import left_pad
from trt_lora.runtime.generation.next_tokens import RowLogits
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.memory.tensor import TensorMap


class GrowingRows:
    """`Rows` of an engine whose cache is longer at every step."""

    def __init__(self, executor: Executor, tensor_map: TensorMap) -> None:
        """Begin without sequences; `tensor_map` holds the engine's LoRA bindings."""
        self._executor, self._map = executor, TensorMap(tensor_map)
        self._prompts: dict[Hashable, Sequence[int]] = {}
        self._removed = set[Hashable]()
        self._decoder: GrowingDecoder | None = None  # from the first step on
        self._pad = executor.manifest.base_model.pad_token_id

    def add(
        self,
        row: Hashable,
        prompt: Sequence[int],
        *,
        temperature: float = 0.0,
        adapter: Lease | None = None,
        copy_of: Hashable | None = None,
    ) -> None:
        """Take a sequence in; see `Rows.add`."""
        # The logits come to the host; all have one adapter; all prompts are run in one step.
        del temperature, adapter, copy_of
        if self._decoder is not None:
            raise StateError(
                "the KV cache of this engine grows: sequences begin together; start another "
                "batch, or build with --kv-cache static"
            )
        self._prompts[row] = prompt

    def room(self, row: Hashable) -> int:
        """Return how many tokens may follow the longest prompt."""
        del row  # all are padded to the longest
        longest = max(map(len, self._prompts.values()))
        return self._executor.manifest.max_seq_len - longest

    def step(self, tokens: Mapping[Hashable, int], *, ahead: bool = False) -> RowLogits:
        """Run the prompts, or a token of each; see `Rows.step`."""
        del ahead  # the next step needs a cache that this one makes
        if self._decoder is None:
            self._decoder = GrowingDecoder(self._executor, self._map, len(self._prompts))
            ids, mask = left_pad(list(self._prompts.values()), self._pad)
            named = {row for row in self._prompts if row not in self._removed}
        else:
            ids = np.full((len(self._prompts), 1), self._pad, np.int64)
            for place, row in enumerate(self._prompts):
                ids[place] = tokens.get(row, self._pad)
            named = set(tokens)
            mask = np.array([[int(row in named)] for row in self._prompts])
        logits = self._decoder.step(ids, mask)[:, -1]
        rows = tuple(row for row in self._prompts if row in named)
        if len(rows) == len(self._prompts):
            return RowLogits(rows, logits)
        return RowLogits(rows, logits[[row in named for row in self._prompts]])

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """Let a sequence go; its row is padding from now on."""
        del clear  # rows of a cache that grows are never used again
        self._removed.add(row)

    def clear(self) -> None:
        """Let all sequences go, and begin with another cache; see `Rows.clear`."""
        self._prompts.clear()
        self._removed.clear()
        self._decoder = None

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings; see `Rows.use_adapter`."""
        self._map.update(tensor_map)
        if self._decoder is not None:
            self._decoder.use_adapter(tensor_map)
