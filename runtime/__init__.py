"""Inference runtime: engines, adapters, adapter switching and text generation."""

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.adapters.shard import shard_adapter
from trt_lora.runtime.engines.engine import Engine, Executor
from trt_lora.runtime.engines.open_engine import open_engine
from trt_lora.runtime.generation.batch import Batch, Token
from trt_lora.runtime.generation.generate import Completion, generate
from trt_lora.runtime.generation.sampling import SamplingParams
from trt_lora.runtime.generation.stream_text import stream_text
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache_config import CacheConfig
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.scheduler import Scheduler, StepAnswers

__all__ = [
    "Adapter",
    "Batch",
    "BatcherConfig",
    "CacheConfig",
    "Completion",
    "Coverage",
    "Engine",
    "Executor",
    "LoRAManager",
    "Manifest",
    "SamplingParams",
    "Scheduler",
    "SlotAdapters",
    "StepAnswers",
    "Tensor",
    "TensorMap",
    "TextTokenizer",
    "Token",
    "generate",
    "load_adapter",
    "open_engine",
    "read_manifest",
    "save_adapter",
    "shard_adapter",
    "stream_text",
]
