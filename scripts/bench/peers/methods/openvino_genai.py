"""openvino-genai: a model of optimum-intel, the PEFT adapter as it is."""

import time
from importlib import import_module
from typing import Any

import numpy as np

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows, Setup

ov: Any = import_module("openvino")  # not installed where types are checked
og: Any = import_module("openvino_genai")

ADAPTER_FILE = "adapter_model.safetensors"


class OpenvinoGenai:
    """Files: what `optimum-cli export openvino --weight-format fp32` made."""

    def load(self, setup: Setup) -> None:
        """Load the model for this adapter; activations and cache are float32."""
        (directory,) = setup.files
        self._adapter = og.AdapterConfig(og.Adapter(str(setup.adapter / ADAPTER_FILE)))
        self._pipeline = og.LLMPipeline(
            str(directory),
            "CPU",
            adapters=self._adapter,
            INFERENCE_PRECISION_HINT="f32",
            KV_CACHE_PRECISION="f32",
            INFERENCE_NUM_THREADS=setup.threads,
        )

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Run the whole answer, which is one call; its clock tells when the first tokens came."""
        config = og.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = steps + 1
        config.do_sample, config.ignore_eos = False, True
        array = np.array(ids, np.int64)
        inputs = og.TokenizedInputs(ov.Tensor(array), ov.Tensor(np.ones_like(array)))
        start = time.perf_counter()
        result = self._pipeline.generate(inputs, config, adapters=self._adapter)
        whole = time.perf_counter() - start
        first = result.perf_metrics.get_ttft().mean / 1e3
        return PeerAnswer(first, whole - first, [list(row) for row in result.tokens])
