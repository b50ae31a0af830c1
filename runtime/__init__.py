"""Inference runtime: engines, adapters, adapter switching and text generation.

A name's module is imported when the name is first used: a command that prints its help needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trt_lora.runtime.adapters.adapter import Adapter
    from trt_lora.runtime.adapters.fitting.coverage import Coverage
    from trt_lora.runtime.adapters.load import load_adapter
    from trt_lora.runtime.adapters.save import save_adapter
    from trt_lora.runtime.adapters.shard import shard_adapter
    from trt_lora.runtime.engine import Engine, open_engine
    from trt_lora.runtime.engines.engine import Executor
    from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
    from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
    from trt_lora.runtime.generation.text.chat_template import Chat
    from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
    from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
    from trt_lora.runtime.generation.token import StepAnswers, Token
    from trt_lora.runtime.interfaces.edgellm import LoRAManager
    from trt_lora.runtime.manifest import Manifest, read_manifest
    from trt_lora.runtime.memory.tensor import Tensor, TensorMap
    from trt_lora.runtime.pipelines.adapters import PipelineAdapters
    from trt_lora.runtime.pipelines.engines import PipelineEngines, open_pipeline
    from trt_lora.runtime.serving.engine_loop import EngineLoop
    from trt_lora.runtime.serving.generate import Completion
    from trt_lora.runtime.serving.scheduler import Scheduler
    from trt_lora.runtime.serving.serving_config import ServingConfig
    from trt_lora.runtime.store.config import StoreConfig
    from trt_lora.runtime.store.store import AdapterStore

__all__ = [
    "Adapter",
    "AdapterStore",
    "Chat",
    "Completion",
    "Coverage",
    "Engine",
    "EngineLoop",
    "Executor",
    "LoRAManager",
    "Manifest",
    "PipelineAdapters",
    "PipelineEngines",
    "SamplingParams",
    "Scheduler",
    "ServingConfig",
    "StepAnswers",
    "StoreConfig",
    "StructuredOutputsParams",
    "Tensor",
    "TensorMap",
    "TextTokenizer",
    "Token",
    "default_sampling",
    "load_adapter",
    "open_engine",
    "open_pipeline",
    "read_manifest",
    "save_adapter",
    "shard_adapter",
]

_MODULES = {
    "Adapter": "adapters.adapter",
    "StoreConfig": "store.config",
    "Chat": "generation.text.chat_template",
    "Completion": "serving.generate",
    "Coverage": "adapters.fitting.coverage",
    "Engine": "engine",
    "EngineLoop": "serving.engine_loop",
    "Executor": "engines.engine",
    "LoRAManager": "interfaces.edgellm",
    "Manifest": "manifest",
    "PipelineAdapters": "pipelines.adapters",
    "PipelineEngines": "pipelines.engines",
    "SamplingParams": "generation.parameters.sampling_params",
    "Scheduler": "serving.scheduler",
    "ServingConfig": "serving.serving_config",
    "AdapterStore": "store.store",
    "StepAnswers": "generation.token",
    "StructuredOutputsParams": "generation.text.structured",
    "Tensor": "memory.tensor",
    "TensorMap": "memory.tensor",
    "TextTokenizer": "generation.text.tokenizer",
    "Token": "generation.token",
    "default_sampling": "generation.parameters.default_sampling",
    "load_adapter": "adapters.load",
    "open_engine": "engine",
    "open_pipeline": "pipelines.engines",
    "read_manifest": "manifest",
    "save_adapter": "adapters.save",
    "shard_adapter": "adapters.shard",
}


def __getattr__(name: str) -> object:
    """Import a public name's module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # found there from now on
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
