"""Weights of linears that are read from the checkpoint when they are asked for, or run.

A model of 8B in float32 takes 32 GB; with stand-ins for its linears, and one linear at a time, two.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.loaded_weights import check_tensor, own_names
from trt_lora.builder.checkpoint.weight_files import GGUF, SAFETENSORS
from trt_lora.builder.export.torch_modules import module_linears, weight_shape


@dataclass(frozen=True)
class StreamedWeights:
    """The weights of a model's linears, some of which it has stand-ins for."""

    model: Any  # a `PreTrainedModel` in float32
    checkpoint: Checkpoint
    names: Mapping[str, str]  # by the paths of those linears, the paths that the checkpoint has

    def __getitem__(self, path: str) -> torch.Tensor:
        """Return the weight [n, k] of a linear, in the checkpoint's dtype or float32."""
        if path in self.names:
            return self.checkpoint.tensor(f"{self.names[path]}.weight")
        module = self.model.get_submodule(path)
        own: torch.Tensor = module.weight.T if isinstance(module, Conv1D) else module.weight
        return own.detach()

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield path and [n, k] of every linear."""
        for path, module in module_linears(self.model):
            yield path, weight_shape(module)

    def check(self) -> None:
        """Refuse weights that are read later and are not finite, before minutes have gone by.

        Raises:
            ModelError: there are such.
        """
        for path, name in self.names.items():
            check_tensor(self.checkpoint.directory, f"{name}.weight", self[path])

    @contextmanager
    def in_modules(self) -> Iterator[None]:
        """Let each linear have its weight while it runs."""
        hooks = [hook for path in self.names for hook in self._hooks(path)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, path: str) -> Iterator[Any]:
        module = self.model.get_submodule(path)
        stand_in = module.weight

        def read(*_: object) -> None:
            module.weight = torch.nn.Parameter(self[path].float(), requires_grad=False)

        def forget(*_: object) -> None:
            module.weight = stand_in

        yield module.register_forward_pre_hook(read)
        yield module.register_forward_hook(forget, always_call=True)


def streamable(checkpoint: Checkpoint, model: Any) -> dict[str, tuple[int, int]]:
    """Return [n, k] of the linears whose weights a file has as they are, by its paths of them.

    Args:
        checkpoint: on disk; of a pickle, a tensor by itself may cost reading all.
        model: its `PreTrainedModel`, on any device.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    linears = {
        path: weight_shape(module)
        for path, module in module_linears(model)
        if isinstance(module, torch.nn.Linear) and uses[id(module.weight)] == 1
    }
    stored = [
        (weight.name.removesuffix(".weight"), weight.shape)
        for path, header in checkpoint.headers.items()
        for weight in header
        if path.suffix in (SAFETENSORS, GGUF) and weight.name.endswith(".weight")
    ]
    return {
        name: (shape[0], shape[1])
        for name, shape in stored
        if any(linears.get(own) == shape for own in own_names(name, model))
    }
