"""ComponentStep: a component of a diffusers pipeline as one call of flat tensors, to be traced."""

from collections.abc import Collection
from typing import Any

import torch

from trt_lora.builder.export.component_calls import component_call
from trt_lora.builder.passes.linears import WRAPPER_ATTRIBUTE


class ComponentStep(torch.nn.Module):
    """A denoiser or text encoder with the inputs and outputs that `component_call` says."""

    def __init__(self, model: Any, outputs: Collection[str] = ()) -> None:
        """Wrap a module of diffusers or transformers.

        Args:
            model: the module.
            outputs: those to return, of what its call says; none: all.

        Raises:
            ModelError: nothing says how a module of its class is called.
        """
        super().__init__()
        setattr(self, WRAPPER_ATTRIBUTE, model)
        self._call = component_call(model)
        self.input_names = [*self._call.inputs]
        self.output_names = [n for n in self._call.outputs if n in outputs or not outputs]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the component on inputs in the order of their names."""
        found = self._call.run(**dict(zip(self.input_names, inputs, strict=True)))
        every = found if isinstance(found, tuple) else (found,)
        named = dict(zip(self._call.outputs, every, strict=True))
        return tuple(named[name] for name in self.output_names)

    def example_inputs(self) -> tuple[Any, ...]:
        """Return inputs whose sizes differ, so that no dimension is specialised away."""
        return tuple(self._call.inputs.values())

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Return those dimensions of the example inputs that vary."""
        return (tuple(self._call.sizes[name] for name in self.input_names),)
