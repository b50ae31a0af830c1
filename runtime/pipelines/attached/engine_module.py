"""A component of a pipeline whose work an engine does: what diffusers asks of a model."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trt_lora.runtime.engine import Engine
from trt_lora.runtime.engines.graph_inputs import batch_rows
from trt_lora.runtime.pipelines.attached.active_adapters import ActiveAdapters
from trt_lora.runtime.pipelines.attached.calls import (
    answer_of,
    arrays_of,
    forward_of,
    read_call,
    tensors_of,
)


class EngineModule(nn.Module):
    """A denoiser or text encoder without weights, called as the model of diffusers is."""

    device = torch.device("cpu")  # where an engine takes its inputs

    def __init__(self, name: str, engine: Engine, config: Any, active: ActiveAdapters) -> None:
        """Take the component's name, its engine, the model's config, and what the pipeline applies.

        Raises:
            ConfigError: the engine is of no class of diffusers or transformers.
        """
        super().__init__()
        self.engine, self.config = engine, config
        self._name, self._active = name, active
        manifest = engine.manifest
        self._forward = forward_of(manifest)
        self._inputs = [each for each in manifest.inputs if each.name not in manifest.lora_inputs]
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        if width := getattr(config, "projection_class_embeddings_input_dim", None):
            # What SDXL compares the sizes of a picture with.
            self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=width))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine with the pipeline's active adapters, on arguments of the model's forward.

        Raises:
            ConfigError: an argument is no input of the engine, or one is missing.
            TensorError, UnknownAdapterError, AdapterError, StateError: as `Engine.run`.
        """
        manifest = self.engine.manifest
        call = read_call(self._forward, [each.name for each in self._inputs], args, kwargs)
        arrays = arrays_of(call, self._inputs)
        rows = partial(batch_rows, manifest, arrays)
        with self._active.using(self._name, rows, call.scale) as adapter:
            outputs = self.engine.run(arrays, adapter=adapter)
        device = getattr(next(iter(call.inputs.values())), "device", self.device)
        tensors = tensors_of(outputs, manifest.outputs, device)
        return answer_of(call, manifest.base_model.architecture, tensors)

    def cache_context(self, *state: Any, **named: Any) -> AbstractContextManager[None]:
        """Return a context of no effect: an engine caches nothing between steps."""
        return nullcontext()
