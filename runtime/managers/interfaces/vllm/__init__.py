"""vLLM's LoRA classes over `SlotAdapters`, by vLLM's own names."""

from trt_lora.runtime.managers.interfaces.vllm.config import VllmLoRAConfig as LoRAConfig
from trt_lora.runtime.managers.interfaces.vllm.layer_weights import (
    LoRALayerWeights,
    PackedLoRALayerWeights,
)
from trt_lora.runtime.managers.interfaces.vllm.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
)
from trt_lora.runtime.managers.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.managers.interfaces.vllm.model import LoRAModel
from trt_lora.runtime.managers.interfaces.vllm.peft_helper import PEFTHelper
from trt_lora.runtime.managers.interfaces.vllm.request import VllmLoRARequest as LoRARequest
from trt_lora.runtime.managers.interfaces.vllm.worker import WorkerLoRAManager

__all__ = [
    "LRUCacheLoRAModelManager",
    "LoRAConfig",
    "LoRALayerWeights",
    "LoRAMapping",
    "LoRAModel",
    "LoRAModelManager",
    "LoRARequest",
    "PEFTHelper",
    "PackedLoRALayerWeights",
    "WorkerLoRAManager",
]
