"""What runs an engine: executors, adapters, the manager that switches them, and generation."""

from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.coverage import Coverage
from trt_lora.runtime.engine import Engine, Executor
from trt_lora.runtime.generate import Completion, generate
from trt_lora.runtime.load import load_adapter
from trt_lora.runtime.manager import LoRAManager
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.runtime.open_engine import open_engine
from trt_lora.runtime.sampling import Sampling
from trt_lora.runtime.save import save_adapter
from trt_lora.runtime.shard import shard_adapter
from trt_lora.runtime.tensors import Tensor, TensorMap
from trt_lora.runtime.text import TextTokenizer

__all__ = [
    "Adapter",
    "Completion",
    "Coverage",
    "Engine",
    "Executor",
    "LoRAManager",
    "Manifest",
    "Sampling",
    "Tensor",
    "TensorMap",
    "TextTokenizer",
    "generate",
    "load_adapter",
    "open_engine",
    "read_manifest",
    "save_adapter",
    "shard_adapter",
]
