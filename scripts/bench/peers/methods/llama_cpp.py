"""llama.cpp, in its Python package xllamacpp: GGUF files of llama.cpp's own converters."""

import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows, Setup

xllamacpp: Any = import_module("xllamacpp")  # not installed where types are checked


UNKNOWN = -1


class LlamaCpp:
    """Files: the model and the adapter, each a float32 GGUF; `--lora` by the server's options."""

    def load(self, setup: Setup) -> None:
        """Start its server, without a port, with a slot for every row."""
        model, adapter = setup.files
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel = setup.max_rows * setup.max_len, setup.max_rows
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.lora_adapters = [_adapter(adapter)]
        self._server = xllamacpp.Server(params)
        self._is_first = True

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Run whole answers, a request a row; its own clock tells when the first tokens came.

        The server tells tokens only with their probabilities, which take time: those of the first
        answer are told, and of the others how many there are, as `UNKNOWN`.
        """
        with ThreadPoolExecutor(len(ids)) as pool:
            start = time.perf_counter()
            answers = list(pool.map(lambda row: self._answer(row, steps + 1), ids))
            whole = time.perf_counter() - start
        self._is_first = False
        first = max(answer["timings"]["prompt_ms"] for answer in answers) / 1e3
        return PeerAnswer(first, whole - first, [_tokens(answer) for answer in answers])

    def _answer(self, ids: list[int], tokens: int) -> dict[str, Any]:
        request = {
            "prompt": ids,
            "n_predict": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
            "n_probs": int(self._is_first),
        }
        answer: dict[str, Any] = self._server.handle_completions(request)
        return answer


def _tokens(answer: dict[str, Any]) -> list[int]:
    (choice,) = answer["choices"]
    if choice["logprobs"] is None:
        return [UNKNOWN] * answer["usage"]["completion_tokens"]
    return [token["id"] for token in choice["logprobs"]["content"]]


def _adapter(path: Path) -> Any:
    info = xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = str(path), 1.0
    return info
