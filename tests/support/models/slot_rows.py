"""Rows of a static cache on an engine for many adapters, each with its own; or on a base engine."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trt_lora.runtime import Engine, TensorMap
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import token_inputs
from trt_lora.runtime.memory.tensor import tensor_from_numpy
from trt_lora.runtime.store.store import AdapterStore

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class SlotRows:
    """Sequences that join, decode together and leave."""

    def __init__(self, engine: Engine, adapters: AdapterStore | None) -> None:
        """Make an empty cache; None: the engine has no LoRA inputs."""
        self._engine, self._adapters = engine, adapters
        self._cache = KVCache(engine.manifest, engine.memory, engine.manifest.max_batch_size)
        self._names: dict[str, str | None] = {}

    def join(self, row: str, adapter: str | None, prompt: Ids) -> Logits:
        """Prefill a prompt [s] alone; return logits [s, vocab]."""
        self._names[row] = adapter
        first = self._cache.admit(row)
        (logits,) = self._run([row], prompt[None], first)
        return np.asarray(logits)

    def leave(self, row: str) -> None:
        """Free the row; another may move there."""
        self._cache.release(row)

    def step(self, tokens: Mapping[str, int]) -> dict[str, Logits]:
        """Append a token to every row; return logits [1, vocab] of each."""
        rows = [str(owner) for owner in self._cache.owners]
        logits = self._run(rows, np.array([[tokens[row]] for row in rows]), 0)
        return dict(zip(rows, logits, strict=True))

    def _run(self, rows: list[str], ids: Ids, first: int) -> Logits:
        count, width = ids.shape
        lengths = self._cache.lengths[first : first + count]
        bound = int(lengths.max()) + width
        inputs = token_inputs(ids, lengths, np.arange(ids.size), bound)
        tensor_map = TensorMap({n: tensor_from_numpy(array) for n, array in inputs.items()})
        tensor_map.update(self._cache.views(first, count))
        if self._adapters is not None:
            tensor_map.update(self._adapters.bindings.rows([self._names[row] for row in rows]))
        logits: Logits = self._engine.execute(tensor_map)["logits"].numpy()
        lengths += width
        return logits.reshape(count, width, -1)


def logits_in_a_batch(
    engine: Engine, names: Sequence[str], rows: Sequence[Ids], steps: int
) -> list[Logits]:
    """Return logits [s, vocab] of every row of tokens [s], with its adapter; "" is the base model.

    All but the last `steps` are its prompt; those come one by one, of all rows together.
    """
    batched = SlotRows(engine, engine.adapters)
    found = [
        [batched.join(str(place), name or None, row[:-steps])]
        for place, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    for step in range(-steps, 0):
        tokens = {str(place): int(row[step]) for place, row in enumerate(rows)}
        for place, logits in batched.step(tokens).items():
            found[int(place)].append(logits)
    return [np.concatenate(parts) for parts in found]
