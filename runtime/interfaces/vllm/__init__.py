"""vLLM's LoRA classes over `AdapterStore`, by vLLM's own names."""

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.interfaces.vllm.config import LoRAConfig
from trt_lora.runtime.interfaces.vllm.llm import LLM
from trt_lora.runtime.interfaces.vllm.manager import LoRAModelManager, LRUCacheLoRAModelManager
from trt_lora.runtime.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.interfaces.vllm.model import LoRALayerWeights, LoRAModel
from trt_lora.runtime.interfaces.vllm.request import (
    CompletionOutput,
    LoRARequest,
    RequestOutput,
    TokenLogprob,
)
from trt_lora.runtime.interfaces.vllm.worker import PEFTHelper, WorkerLoRAManager

__all__ = [
    "LLM",
    "CompletionOutput",
    "LRUCacheLoRAModelManager",
    "LoRAConfig",
    "LoRALayerWeights",
    "LoRAMapping",
    "LoRAModel",
    "LoRAModelManager",
    "LoRARequest",
    "PEFTHelper",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "WorkerLoRAManager",
]
