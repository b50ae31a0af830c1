"""This project: an engine directory on ONNX Runtime, decoded with a static cache."""

import numpy as np

from trt_lora.runtime import open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows, Setup, timed


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

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Run the prompt into an empty cache, in chunks of what the engine takes, then decode."""
        array = np.array(ids)
        if len(ids) not in self._decoders:
            self._decoders[len(ids)] = self._new_decoder(array[:, :1])
        decoder = self._decoders[len(ids)]
        decoder.cache.lengths[:] = 0
        longest = self._engine.manifest.max_input_len
        first_chunk, *chunks = np.split(array, range(longest, array.shape[1], longest), axis=1)
        tokens: list[Ids] = []  # of all rows, step by step

        def first() -> Rows:
            logits = decoder.run(first_chunk)
            for chunk in chunks:
                logits = decoder.run(chunk)
            tokens.append(logits.argmax(-1))
            return _rows(tokens)

        def rest() -> Rows:
            for _ in range(steps):
                tokens.append(decoder.decode(tokens[-1]).argmax(-1))
            return _rows(tokens[1:])

        return timed(first, rest)

    def _new_decoder(self, ids: Ids) -> StaticDecoder:
        """Run once: the first run in a new cache takes half a second more."""
        decoder = StaticDecoder(self._engine, self._map, len(ids))
        decoder.run(ids)
        return decoder


def _rows(tokens: list[Ids]) -> Rows:
    rows: Rows = np.stack(tokens, axis=1).tolist()
    return rows
