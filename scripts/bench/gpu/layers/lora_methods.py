"""LoRA methods of a step: the builder's operator, torch's GEMMs, TensorRT's GEMMs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import workspace_bytes
from trt_lora.scripts.bench.gpu.device import Device
from trt_lora.scripts.bench.gpu.elementwise_kernels import Tensors
from trt_lora.scripts.bench.gpu.layers.decoder_layers import columns
from trt_lora.scripts.bench.gpu.layers.random_adapters import (
    Factors,
    LayerFactors,
    LayerStacks,
    RowTensors,
    Stack,
)
from trt_lora.scripts.bench.gpu.model_shapes import ModelShape

# Adds a group's deltas to y [m, n_1 + n_2 + ...] and returns every linear's part of it, which may
# lie elsewhere then: method(layer, group, x, y).
LoraMethod = Callable[[int, str, torch.Tensor, torch.Tensor], Tensors]


@dataclass(frozen=True)
class AddToOutput:
    """Adds LoRA to what the base's products have written."""

    add: LoraMethod

    def deltas(self, layer: int, group: str, x: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return ()

    def residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`."""
        return residual

    def after_product(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return self.add(layer, group, x, y)


def no_lora(model: ModelShape) -> AddToOutput:
    """Return the base model, and so also a merged adapter: the same products, other numbers."""

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return columns(y, [linear.n for linear in model.groups[group]])

    return AddToOutput(add)


class TrtLoraKernels:
    """The operator as the builder inserts it: one node for each group.

    q, k, v and gate, up: the deltas alone, added by what reads them. o and down: added to the
    residual. Nothing of it waits for the base's product of the same group, nor that for it.
    """

    def __init__(
        self,
        device: Device,
        model: ModelShape,
        adapter: Sequence[LayerFactors],
        m: int,
        *,
        streams: int,
    ) -> None:
        """Make the outputs.

        Args:
            device: where the chain runs.
            model: the linears.
            adapter: the factors, in our layout.
            m: rows.
            streams: 1, or 2 to run every node beside its group's product.
        """
        self._calls = {
            name: GroupCall(
                device, shape_of(factors, m, device.dtype, has_addend=adds_to_residual(name))
            )
            for name, factors in adapter[0].items()
        }
        self._device, self._adapter, self._streams = device, adapter, streams
        self._outs = {
            name: [device.empty(m, linear.n) for linear in group]
            for name, group in model.groups.items()
        }

    def deltas(self, layer: int, group: str, x: torch.Tensor) -> Tensors:
        """See `Lora`."""
        return self._launch(layer, group, x, ())

    def residual(
        self, layer: int, group: str, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Lora`; o and down write different tensors, so that neither reads what it writes."""
        return self._launch(layer, group, x, [residual])[0]

    def after_product(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        """See `Lora`."""
        if self._streams > 1:
            self._device.wait_for_second_stream()
        return _parts(self._adapter[layer][group], y)

    def _launch(self, layer: int, group: str, x: torch.Tensor, ys: Tensors) -> Tensors:
        factors, outs = self._adapter[layer][group], self._outs[group]
        if self._streams > 1:
            with self._device.on_second_stream():
                self._calls[group].launch(x, factors, ys, outs)
        else:
            self._calls[group].launch(x, factors, ys, outs)
        return outs


def adds_to_residual(group: str) -> bool:
    """Return whether the builder's node adds to the residual; it returns deltas otherwise."""
    return group in ("o", "down")


class GroupCall:
    """Our kernels for one group: its shape and a workspace of its own."""

    def __init__(self, device: Device, shape: GroupShape) -> None:
        """Make the workspace; two calls at a time may not share one."""
        self._device, self._shape = device, shape
        self._workspace = device.empty(workspace_bytes(shape) // 4, dtype=torch.float32)

    def launch(
        self,
        x: torch.Tensor,
        factors: Sequence[Factors | Stack],
        ys: Tensors,
        outs: Tensors,
        rows: RowTensors | None = None,
    ) -> None:
        """Enqueue the call on the current stream; stacks want what the rows take."""
        buffers = GroupBuffers(
            x.data_ptr(),
            tuple(each.a.data_ptr() for each in factors),
            tuple(each.b.data_ptr() for each in factors),
            tuple(y.data_ptr() for y in ys),
            tuple(out.data_ptr() for out in outs),
            self._workspace.data_ptr(),
            *((rows.slot.data_ptr(), rows.rank.data_ptr()) if rows else ()),
        )
        self._device.kernels.launch(self._shape, buffers, self._device.stream())


def shape_of(
    factors: Sequence[Factors], m: int, dtype: torch.dtype, *, has_addend: bool
) -> GroupShape:
    """Return the shapes of a call for m rows."""
    sites = tuple(SiteShape(each.b.shape[1], each.rank) for each in factors)
    return GroupShape(
        m, factors[0].a.shape[0], sites, str(dtype).removeprefix("torch."), has_addend
    )


def addmm(adapter: Sequence[LayerFactors]) -> LoraMethod:
    """Return torch's shortest: `y += (x @ A) @ B`, two products a linear."""

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        parts = _parts(adapter[layer][group], y)
        for factors, part in zip(adapter[layer][group], parts, strict=True):
            part.addmm_(torch.mm(x, factors.a), factors.b)
        return parts

    return add


def pair_add(adapter: Sequence[LayerFactors]) -> LoraMethod:
    """Return two products and an addition a linear."""

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        parts = _parts(adapter[layer][group], y)
        for factors, part in zip(adapter[layer][group], parts, strict=True):
            part.add_(torch.mm(torch.mm(x, factors.a), factors.b))
        return parts

    return add


def gathered(stacks: Sequence[LayerStacks], slot: torch.Tensor) -> LoraMethod:
    """Return torch's shortest for rows of several adapters: A and B of each row are gathered first.

    Args:
        stacks: of every layer, with the zeros of the base model behind the slots.
        slot: of each row [m]; -1 is the base model.
    """

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        of_group = stacks[layer][group]
        parts = columns(y, [stack.b.shape[2] for stack in of_group])
        index = slot % len(of_group[0].a)
        for stack, part in zip(of_group, parts, strict=True):
            t = torch.bmm(x[:, None], stack.a.index_select(0, index))
            part[:, None].baddbmm_(t, stack.b.index_select(0, index))
        return parts

    return add


def native_dynamic(device: Device, adapter: Sequence[LayerFactors]) -> LoraMethod:
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
