"""Stand-ins for weights that a graph reads as codes: shapes, and any values, in one memory.

A model is traced, and its cache is tried, without the floats that its codes mean.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import onnx_ir as ir
import torch

from trt_lora.builder.checkpoint.loaded_weights import own_names
from trt_lora.builder.export.torch_modules import module_linears
from trt_lora.builder.export.weight_views import weight_of

_STEP = 64  # values between the first ones of two weights, so that no two are equal
_DEVIATION = 0.02  # that most models are initialised with


@dataclass(frozen=True)
class StandIns:
    """Weights of one model; none is to be written."""

    shapes: Mapping[str, tuple[int, int]]  # [n, k] by the paths that a checkpoint has
    dtype: torch.dtype

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """A weight [n, k] for each path."""
        return {
            path: self._memory[i * _STEP :][: prod(shape)].view(shape)
            for i, (path, shape) in enumerate(self.shapes.items())
        }

    def paths(self, model: Any, embedding: str = "") -> Mapping[str, str]:
        """Return the path of the linear that each is the weight of, and of nothing else, by name.

        Args:
            model: a `PreTrainedModel` that was loaded with them; one that is missing in the result
                may have been copied, as a part of another weight.
            embedding: path of one that a linear may be tied to.
        """
        users, linears = defaultdict[int, list[str]](list), dict(module_linears(model))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name != f"{embedding}.weight":
                users[parameter.data_ptr()].append(name.removesuffix(".weight"))
        found = {name: users[weight.data_ptr()] for name, weight in self.weights.items()}
        return {
            name: paths[0]
            for name, paths in found.items()
            if len(paths) == 1 and paths[0] in linears and paths[0] in own_names(name, model)
        }

    def read_by(self, graph: ir.Graph) -> frozenset[str]:
        """Return the names of those that a graph of the model reads."""
        weights = [weight_of(value) for value in graph.initializers.values()]
        read = {weight.data_ptr() for weight in weights if weight is not None}
        return frozenset(n for n, weight in self.weights.items() if weight.data_ptr() in read)

    @cached_property
    def _memory(self) -> torch.Tensor:
        size = max(map(prod, self.shapes.values()), default=0) + len(self.shapes) * _STEP
        generator = torch.Generator().manual_seed(0)
        return torch.randn(size, dtype=self.dtype, generator=generator).mul_(_DEVIATION)
