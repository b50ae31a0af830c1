"""TensorRT-LLM's LoRA requests and cache over `AdapterStore`."""

from trt_lora.runtime.interfaces.trtllm.cache_options import LoraCacheOptions
from trt_lora.runtime.interfaces.trtllm.peft_cache import PeftCacheManager, PeftTaskNotCachedError
from trt_lora.runtime.interfaces.trtllm.request import TrtllmLoraRequest

__all__ = ["LoraCacheOptions", "PeftCacheManager", "PeftTaskNotCachedError", "TrtllmLoraRequest"]
