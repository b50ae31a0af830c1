"""Build engines: export a base model, insert LoRA inputs, compile."""

from trt_lora.builder.build import build_engine
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.graphs.config import GraphConfig

__all__ = ["BuildConfig", "GraphConfig", "build_engine"]
