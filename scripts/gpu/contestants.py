"""Ways to add LoRA to the chain: ours, and what torch and TensorRT's own matrix products do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trt_lora.plugins.group import GroupBuffers, GroupShape, SiteShape
from trt_lora.plugins.launch import workspace_bytes
from trt_lora.scripts.gpu.adapters import Factors, LayerFactors
from trt_lora.scripts.gpu.chain import Tensors, columns
from trt_lora.scripts.gpu.device import Device
from trt_lora.scripts.gpu.shapes import ModelShape

# Adds a group's deltas to y [m, n_1 + n_2 + ...] and returns every linear's part of it, which may
# lie elsewhere then: adder(layer, group, x, y).
Adder = Callable[[int, str, torch.Tensor, torch.Tensor], Tensors]


@dataclass(frozen=True)
class AfterBase:
    """Adds LoRA to what the base's products have written."""

    add: Adder
    merges_qkv: bool = True

    def qkv(self, layer: int, x: torch.Tensor, ys: Tensors) -> Tensors:
        """See `Lora`."""
        return self.add(layer, "qkv", x, ys[0])

    def before_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`."""
        return residual

    def after_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`."""
        return self.add(layer, group, x, residual)[0]

    def before_gate_up(self, layer: int, x: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return ()

    def after_gate_up(self, layer: int, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return self.add(layer, "gate_up", x, y)


@dataclass(frozen=True)
class NoLora:
    """The base model, and so also a merged adapter: the same products with other numbers."""

    merges_qkv: bool = False

    def qkv(self, layer: int, x: torch.Tensor, ys: Tensors) -> Tensors:
        """See `Lora`."""
        return ys

    def before_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`."""
        return residual

    after_residual = before_residual

    def before_gate_up(self, layer: int, x: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return ()

    def after_gate_up(self, layer: int, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return y.chunk(2, dim=1)


class Ours:
    """The operator as the builder inserts it: one node for each group.

    q, k and v: added to the products' results. o and down: added to the residual before the
    product is. gate and up: the deltas alone, beside the product, and added by what follows.
    """

    merges_qkv = False

    def __init__(
        self,
        device: Device,
        model: ModelShape,
        adapter: Sequence[LayerFactors],
        m: int,
        *,
        beside: bool = True,
    ) -> None:
        """Make the outputs; `beside` runs gate and up on a second stream."""
        self._calls = {
            name: GroupCall(device, shape_of(factors, m, device.dtype, adds=name != "gate_up"))
            for name, factors in adapter[0].items()
        }
        self._device, self._adapter, self._beside = device, adapter, beside
        # o and down take turns, so that neither writes the residual that it reads.
        self._residuals = {name: device.empty(m, model.hidden) for name in ("o", "down")}
        self._zs = [device.empty(m, linear.n) for linear in model.groups["qkv"]]
        self._deltas = [device.empty(m, linear.n) for linear in model.groups["gate_up"]]

    def qkv(self, layer: int, x: torch.Tensor, ys: Tensors) -> Tensors:
        """See `Lora`."""
        return self._launch(layer, "qkv", x, ys, self._zs)

    def before_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`."""
        return self._launch(layer, group, x, [residual], [self._residuals[group]])[0]

    def after_residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`."""
        return residual

    def before_gate_up(self, layer: int, x: torch.Tensor) -> Tensors:
        """See `Lora`."""
        if not self._beside:
            return self._launch(layer, "gate_up", x, (), self._deltas)
        with self._device.beside():
            return self._launch(layer, "gate_up", x, (), self._deltas)

    def after_gate_up(self, layer: int, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """See `Lora`."""
        if self._beside:
            self._device.join()
        return y.chunk(2, dim=1)

    def _launch(
        self, layer: int, group: str, x: torch.Tensor, ys: Tensors, outs: Tensors
    ) -> Tensors:
        self._calls[group].launch(x, self._adapter[layer][group], ys, outs)
        return outs


class GroupCall:
    """Our kernels for one group: its shape and a workspace of its own."""

    def __init__(self, device: Device, shape: GroupShape) -> None:
        """Make the workspace; two calls at a time may not share one."""
        self._device, self._shape = device, shape
        self._workspace = device.empty(workspace_bytes(shape) // 4, dtype=torch.float32)

    def launch(
        self, x: torch.Tensor, factors: Sequence[Factors], ys: Tensors, outs: Tensors
    ) -> None:
        """Enqueue the call on the current stream."""
        buffers = GroupBuffers(
            x.data_ptr(),
            tuple(each.a.data_ptr() for each in factors),
            tuple(each.b.data_ptr() for each in factors),
            tuple(y.data_ptr() for y in ys),
            tuple(out.data_ptr() for out in outs),
            self._workspace.data_ptr(),
        )
        self._device.kernels.launch(self._shape, buffers, self._device.stream())


def shape_of(factors: Sequence[Factors], m: int, dtype: torch.dtype, *, adds: bool) -> GroupShape:
    """Return the shapes of a call for m rows."""
    sites = tuple(SiteShape(each.b.shape[1], each.rank) for each in factors)
    return GroupShape(m, factors[0].a.shape[0], sites, str(dtype).removeprefix("torch."), adds)


def addmm(adapter: Sequence[LayerFactors]) -> Adder:
    """Return torch's shortest: `y += (x @ A) @ B`, two products a linear."""

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        parts = _parts(adapter[layer][group], y)
        for factors, part in zip(adapter[layer][group], parts, strict=True):
            part.addmm_(torch.mm(x, factors.a), factors.b)
        return parts

    return add


def pair_add(adapter: Sequence[LayerFactors]) -> Adder:
    """Return two products and an addition a linear."""

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        parts = _parts(adapter[layer][group], y)
        for factors, part in zip(adapter[layer][group], parts, strict=True):
            part.add_(torch.mm(torch.mm(x, factors.a), factors.b))
        return parts

    return add


def native_dynamic(device: Device, adapter: Sequence[LayerFactors]) -> Adder:
    """Return what TensorRT-RTX 1.7.1 makes of matrix products whose rank is dynamic.

    Its kernel list, replayed: A and B are copied to where their rank is padded on every run, then
    a product for the shrink, and one for the expand that adds in its epilogue. One stream, where
    TensorRT has two.
    """
    pads = {
        name: tuple(_padded(device, factors) for factors in group)
        for name, group in adapter[0].items()
    }

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        parts = _parts(adapter[layer][group], y)
        rows = zip(adapter[layer][group], pads[group], parts, strict=True)
        for factors, pad, part in rows:
            pad.a[:, : factors.rank].copy_(factors.a)
            pad.b[: factors.rank].copy_(factors.b)
            part.addmm_(torch.mm(x, pad.a), pad.b)
        return parts

    return add


def _padded(device: Device, factors: Factors) -> Factors:
    """Room for the factors with their rank a multiple of 8, zeros behind them."""
    rank = -(-factors.rank // 8) * 8
    k, n = factors.a.shape[0], factors.b.shape[1]
    return Factors(device.empty(k, rank).zero_(), device.empty(rank, n).zero_())


def _parts(factors: Sequence[Factors], y: torch.Tensor) -> Tensors:
    """Every linear's columns of y."""
    return columns(y, [each.b.shape[1] for each in factors])
