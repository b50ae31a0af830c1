"""Build engines: export a base model, insert LoRA inputs, compile."""

from trt_lora.builder.build import build_engine
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.builder.pipelines.build_pipeline import build_pipeline
from trt_lora.builder.pipelines.config import PipelineConfig

__all__ = ["BuildConfig", "GraphConfig", "PipelineConfig", "build_engine", "build_pipeline"]
