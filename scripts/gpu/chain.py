"""The linears of a decoder as one chain of kernels, with distinct weights in every layer.

    norm, q, k, v | o + residual | norm, gate and up | gated | down + residual

as TensorRT-RTX builds a layer of Llama-3-8B without its attention: nine kernels. o reads a fixed
tensor where the attention would have written. A whole chain reads 15 GB, so that no weight and no
adapter is in the 60 MB of level-2 cache when it is wanted, as in a real step.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trt_lora.scripts.gpu.device import Device
from trt_lora.scripts.gpu.roofline import HEAD_ROWS, ITEM_BYTES
from trt_lora.scripts.gpu.shapes import Linear, ModelShape

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Weights as torch keeps them: [n, k]; those of a group under one another."""

    norms: tuple[torch.Tensor, torch.Tensor]
    groups: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The base model."""

    layers: tuple[Layer, ...]
    head: torch.Tensor  # [vocabulary, hidden]


class Lora(Protocol):
    """How one contestant adds LoRA to the chain; each gets its turn at each group."""

    @property
    def merges_qkv(self) -> bool:
        """Whether q, k and v come out of one product, [m, n_q + n_k + n_v]."""
        ...

    def qkv(self, layer: int, x: torch.Tensor, ys: Tensors) -> Tensors:
        """Return q, k, v [m, n], from those of the base, or from the one that they merged to."""
        ...

    def before_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return what o or down adds its product to."""
        ...

    def after_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual after o or down."""
        ...

    def before_gate_up(self, layer: int, x: torch.Tensor) -> Tensors:
        """Return the deltas [m, n] of gate and up, or none."""
        ...

    def after_gate_up(self, layer: int, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """Return gate and up [m, n], from the base's y [m, 2 n]; rows may be equally far apart."""
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

    def product(group: tuple[Linear, ...]) -> torch.Tensor:
        k = group[0].k
        return device.random(sum(linear.n for linear in group), k, scale=k**-0.5)

    def layer() -> Layer:
        norms = (device.random(model.hidden), device.random(model.hidden))
        return Layer(norms, {name: product(group) for name, group in model.groups.items()})

    layers = tuple(layer() for _ in range(model.layers))
    return Weights(layers, product((Linear("head", model.hidden, model.vocabulary),)))


class Chain:
    """One step for m rows; every contestant runs on the same buffers."""

    def __init__(self, device: Device, model: ModelShape, weights: Weights, m: int) -> None:
        """Make the activations."""
        self._device, self._model, self._weights = device, model, weights
        self._start = device.random(m, model.hidden)
        self._attended = device.random(m, model.hidden)
        self._residual = device.empty(m, model.hidden)
        self._x = device.empty(m, model.hidden)
        qkv = model.groups["qkv"]
        self._apart = [device.empty(m, linear.n) for linear in qkv]
        self._merged = device.empty(m, sum(linear.n for linear in qkv))
        self._gate_up = device.empty(m, 2 * model.inner)
        self._gated = device.empty(m, model.inner)
        self._logits = device.empty(m if m <= HEAD_ROWS else 1, model.vocabulary)

    def run(self, lora: Lora) -> Tensors:
        """Enqueue a step; return the residual and the last layer's q, k and v."""
        residual = self._residual.copy_(self._start)
        ys: Tensors = ()
        for index, layer in enumerate(self._weights.layers):
            x = self._device.glue.rms_norm(residual, layer.norms[0], self._x)
            ys = lora.qkv(index, x, self._qkv(layer, x, lora))
            residual = self._onto(residual, index, "o", self._attended, lora)
            x = self._device.glue.rms_norm(residual, layer.norms[1], self._x)
            residual = self._onto(residual, index, "down", self._mlp(index, x, lora), lora)
        rows = len(self._logits)
        torch.mm(residual[-rows:], self._weights.head.t(), out=self._logits)
        return residual, *ys

    def _qkv(self, layer: Layer, x: torch.Tensor, lora: Lora) -> Tensors:
        weight = layer.groups["qkv"]
        widths = [linear.n for linear in self._model.groups["qkv"]]
        if lora.merges_qkv:
            return (torch.mm(x, weight.t(), out=self._merged),)
        parts = columns(weight.t(), widths)
        with self._device.beside():  # TensorRT runs k and v beside q, too
            for part, out in zip(parts[1:], self._apart[1:], strict=True):
                torch.mm(x, part, out=out)
        torch.mm(x, parts[0], out=self._apart[0])
        self._device.join()
        return self._apart

    def _onto(
        self, residual: torch.Tensor, index: int, group: str, x: torch.Tensor, lora: Lora
    ) -> torch.Tensor:
        residual = lora.before_residual(index, group, x, residual)
        residual.addmm_(x, self._weights.layers[index].groups[group].t())
        return lora.after_residual(index, group, x, residual)

    def _mlp(self, index: int, x: torch.Tensor, lora: Lora) -> torch.Tensor:
        deltas = lora.before_gate_up(index, x)
        weight = self._weights.layers[index].groups["gate_up"]
        y = torch.mm(x, weight.t(), out=self._gate_up)
        ys = lora.after_gate_up(index, x, y)
        return self._device.glue.gated(ys, deltas, self._gated)
