"""TensorRT-Edge-LLM's `LoRAManager` over an `AdapterStore`."""

from trt_lora.runtime.interfaces.edgellm.lora_manager import LoRAManager

__all__ = ["LoRAManager"]
