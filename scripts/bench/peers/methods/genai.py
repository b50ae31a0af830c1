"""onnxruntime-genai: a model of its own builder, an adapter of its own format."""

import json
import os
from importlib import import_module
from typing import Any

import numpy as np

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows, Setup, timed

# Attention without tiles is faster at these lengths; our graph asks for it by itself, see
# builder/passes/lowering/disable_attention_tiling.py.
_NO_TILES = "ORT_GQA_DISABLE_FLASH_ATTENTION"

og: Any = import_module("onnxruntime_genai")  # not installed where types are checked


class Genai:
    """Files: what `genai_adapter.py` made of its builder's model, or that model itself.

    Its builder's own has the adapter in its weights, in their bits, and none can be set.
    """

    def load(self, setup: Setup) -> None:
        """Load the model, and the adapter beside it."""
        (directory,) = setup.files
        os.environ[_NO_TILES] = "1"  # of this process; read when a model is loaded
        self._adapters: Any = None
        config = og.Config(str(directory))
        options = {"intra_op_num_threads": setup.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)
        if found := list(directory.glob("*.onnx_adapter")):
            (adapter,) = found
            self._adapters = og.Adapters(self._model)
            self._adapters.load(str(adapter), "adapter")

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Run in a new generator; what setting its adapter takes is left out."""
        length = len(ids[0]) + steps + 1
        params = og.GeneratorParams(self._model)
        params.set_search_options(
            max_length=length, min_length=length, do_sample=False, batch_size=len(ids)
        )
        generator = og.Generator(self._model, params)
        if self._adapters:
            generator.set_active_adapter(self._adapters, "adapter")
        array = np.array(ids, np.int32)

        def first() -> Rows:
            generator.append_tokens(array)
            return _run(generator, 1)

        return timed(first, lambda: _run(generator, steps))


def _run(generator: Any, steps: int) -> Rows:
    tokens: list[Any] = []
    for _ in range(steps):
        generator.generate_next_token()
        tokens.append(generator.get_next_tokens())
    rows: Rows = np.stack(tokens, axis=1).tolist()
    return rows
