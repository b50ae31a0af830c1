"""Build engines: export a base model, insert LoRA inputs, compile."""

from trt_lora.builder.build import build_engine
from trt_lora.builder.config import BuildConfig

__all__ = ["BuildConfig", "build_engine"]
