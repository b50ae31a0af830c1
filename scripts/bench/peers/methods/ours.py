"""This project: an engine directory on ONNX Runtime, decoded with a static cache."""

import numpy as np

from trt_lora.runtime import open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.scripts.bench.peers.peer import Setup, Timed, timed


class Ours:
    """Files: the engine directory. ONNX Runtime takes a thread for every core by default."""

    def load(self, setup: Setup) -> None:
        """Open the engine; load and activate the adapter."""
        (directory,) = setup.files
        self._engine = open_engine(directory, "onnxruntime").__enter__()  # until the process ends
        adapters = self._engine.adapters
        adapters.load("adapter", setup.adapter)
        self._map = adapters.bindings.rows([adapters.lease("adapter")])
        self._decoders: dict[int, StaticDecoder] = {}  # by rows; a server keeps its cache

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """Run the prompt into an empty cache, in chunks of what the engine takes at once."""
        array, self._steps = np.array(ids), steps
        if len(ids) not in self._decoders:
            self._decoders[len(ids)] = self._new_decoder(array[:, :1])
        self._decoder = self._decoders[len(ids)]
        self._decoder.cache.lengths[:] = 0
        longest = self._engine.manifest.max_input_len
        self._last = array
        chunks = np.split(array, range(longest, array.shape[1], longest), axis=1)

        def run() -> list[list[int]]:
            for chunk in chunks:
                self._last = self._decoder.run(chunk).argmax(-1)[:, None]
            return _rows([self._last])

        return timed(run)

    def decode(self) -> Timed:
        """Run token after token."""

        def run() -> list[list[int]]:
            tokens = []
            for _ in range(self._steps):
                self._last = self._decoder.decode(self._last[:, 0]).argmax(-1)[:, None]
                tokens.append(self._last)
            return _rows(tokens)

        return timed(run)

    def _new_decoder(self, ids: Ids) -> StaticDecoder:
        """Run once: the first run in a new cache takes half a second more."""
        decoder = StaticDecoder(self._engine, self._map, len(ids))
        decoder.run(ids)
        return decoder


def _rows(tokens: list[Ids]) -> list[list[int]]:
    rows: list[list[int]] = np.concatenate(tokens, axis=1).tolist()
    return rows
