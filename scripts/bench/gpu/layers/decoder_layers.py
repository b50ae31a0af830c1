"""Linears of a decoder as one sequence of kernels, with distinct weights per layer.

    norm, q k v, split | o | + residual and norm, gate and up, SiLU gate | down

as TensorRT-RTX builds a layer of Llama-3-8B around its attention: q, k and v in one product, gate
and up in one, the residual added by the norm that follows. `split` stands for what reads q, k and v
there (rotary embedding, copy into the cache) and adds LoRA's deltas on the way. o reads a fixed
tensor where the attention would have written. A whole chain reads 15 GB, so that no weight and no
adapter is in the 60 MB of level-2 cache when it is wanted, as in a real step.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from trt_lora.scripts.bench.gpu.device import Device
from trt_lora.scripts.bench.gpu.elementwise_kernels import Tensors
from trt_lora.scripts.bench.gpu.model_shapes import LinearShape, ModelShape
from trt_lora.scripts.bench.gpu.roofline import HEAD_ROWS, ITEM_BYTES


@dataclass(frozen=True)
class Layer:
    """Weights as torch keeps them: [n, k]; those of a group under one another."""

    norms: tuple[torch.Tensor, torch.Tensor]
    groups: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The base model."""

    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden], before the head
    head: torch.Tensor  # [vocabulary, hidden]


class Lora(Protocol):
    """LoRA method of the layers: before a group's product, or behind it."""

    def deltas(self, layer: int, group: str, x: torch.Tensor) -> Tensors:
        """Return the deltas [m, n] of qkv's or gate_up's linears, or none."""
        ...

    def residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return what the product of o or down is added to [m, hidden]; it is written to later."""
        ...

    def after_product(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """Return every linear's output [m, n] from the product y [m, n_1 + n_2 + ...]."""
        ...


def columns(y: torch.Tensor, widths: Iterable[int]) -> list[torch.Tensor]:
    """Return the columns of y, in parts of these widths; nothing is copied."""
    ends = list(itertools.accumulate(widths, initial=0))
    return [y[:, start:end] for start, end in itertools.pairwise(ends)]


def layer_bytes(model: ModelShape) -> int:
    """Return the size of one layer's weights."""
    return ITEM_BYTES * sum(linear.k * linear.n for linear in model.linears)


def random_weights(device: Device, model: ModelShape) -> Weights:
    """Return weights that keep the activations near one."""

    def product(group: tuple[LinearShape, ...]) -> torch.Tensor:
        k = group[0].k
        return device.random(sum(linear.n for linear in group), k, scale=k**-0.5)

    def layer() -> Layer:
        norms = (device.random(model.hidden), device.random(model.hidden))
        return Layer(norms, {name: product(group) for name, group in model.groups.items()})

    layers = tuple(layer() for _ in range(model.layers))
    head = product((LinearShape("head", model.hidden, model.vocabulary),))
    return Weights(layers, device.random(model.hidden), head)


class DecoderLayers:
    """One step for m rows; every method runs on the same buffers."""

    def __init__(self, device: Device, model: ModelShape, weights: Weights, m: int) -> None:
        """Make the activations."""
        self._device, self._weights = device, weights
        self._start = device.random(m, model.hidden)
        self._attended = device.random(m, model.hidden)
        self._residual = device.empty(m, model.hidden)
        self._x = device.empty(m, model.hidden)
        self._products = {
            name: device.empty(m, sum(linear.n for linear in group))
            for name, group in model.groups.items()
        }
        self._qkv = [device.empty(m, linear.n) for linear in model.groups["qkv"]]
        self._gated = device.empty(m, model.inner)
        self._logits = device.empty(m if m <= HEAD_ROWS else 1, model.vocabulary)

    def run(self, lora: Lora) -> Tensors:
        """Enqueue a step; return the residual and the last layer's q, k and v."""
        elementwise = self._device.elementwise
        residual = self._residual.copy_(self._start)
        product: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            x = elementwise.rms_norm(residual, product, layer.norms[0], self._x)
            elementwise.split(*self._apart(index, "qkv", x, lora), self._qkv)
            residual, product = self._onto(residual, index, "o", self._attended, lora)
            x = elementwise.rms_norm(residual, product, layer.norms[1], self._x)
            gated = elementwise.gated(*self._apart(index, "gate_up", x, lora), self._gated)
            residual, product = self._onto(residual, index, "down", gated, lora)
        x = elementwise.rms_norm(residual, product, self._weights.norm, self._x)
        torch.mm(x[-len(self._logits) :], self._weights.head.t(), out=self._logits)
        return residual, *self._qkv

    def _apart(
        self, index: int, group: str, x: torch.Tensor, lora: Lora
    ) -> tuple[Tensors, Tensors]:
        """Every linear's output, and the deltas that are still to be added."""
        deltas = lora.deltas(index, group, x)
        return lora.after_product(index, group, x, self._multiply(index, group, x)), deltas

    def _onto(
        self, residual: torch.Tensor, index: int, group: str, x: torch.Tensor, lora: Lora
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and the product that the next norm adds to it."""
        residual = lora.residual(index, group, x, residual)
        y = self._multiply(index, group, x)
        return residual, lora.after_product(index, group, x, y)[0]

    def _multiply(self, index: int, group: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights.layers[index].groups[group]
        return torch.mm(x, weight.t(), out=self._products[group])
