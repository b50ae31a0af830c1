"""Random adapters on the device: distinct factors for every linear of every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trt_lora.scripts.bench.gpu.device import Device
from trt_lora.scripts.bench.gpu.model_shapes import LinearShape


@dataclass(frozen=True)
class Factors:
    """One linear's A [k, rank] and B [rank, n], row-major, the scale folded into B."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """Columns of A."""
        return self.a.shape[1]


@dataclass(frozen=True)
class Stack:
    """One linear's adapters in slots: A [slots, k, rank] and B [slots, rank, n], row-major."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class RowTensors:
    """What the rows of a step take: slot [m] and every slot's rank [slots, linears], int32."""

    slot: torch.Tensor
    rank: torch.Tensor


# Of one layer, by group, in the order of the group's linears.
LayerFactors = Mapping[str, tuple[Factors, ...]]
LayerStacks = Mapping[str, tuple[Stack, ...]]
Groups = Mapping[str, tuple[LinearShape, ...]]


def random_adapter(
    device: Device, groups: Groups, rank: int, layers: int
) -> tuple[LayerFactors, ...]:
    """Return an adapter whose deltas are about half as large as what they are added to."""

    def factors(linear: LinearShape) -> Factors:
        return Factors(*_random(device, linear, rank))

    return tuple(
        {name: tuple(factors(linear) for linear in group) for name, group in groups.items()}
        for _ in range(layers)
    )


def random_stacks(
    device: Device, groups: Groups, rank: int, layers: int, slots: int
) -> tuple[LayerStacks, ...]:
    """Return adapters in so many slots; behind them lies one of zeros, which -1 finds."""

    def stack(linear: LinearShape) -> Stack:
        a, b = _random(device, linear, rank, slots + 1)
        a[-1], b[-1] = 0, 0
        return Stack(a, b)

    return tuple(
        {name: tuple(stack(linear) for linear in group) for name, group in groups.items()}
        for _ in range(layers)
    )


def _random(
    device: Device, linear: LinearShape, rank: int, *adapters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    a = device.random(*adapters, linear.k, rank, scale=linear.k**-0.5)
    return a, device.random(*adapters, rank, linear.n, scale=0.5 * rank**-0.5)


def zero_adapter(device: Device, groups: Groups, layers: int) -> tuple[LayerFactors, ...]:
    """Return the base model as the runtime binds it: rank-1 zeros, all in one buffer."""
    widest = max(max(linear.k, linear.n) for group in groups.values() for linear in group)
    zeros = device.empty(widest).zero_()

    def factors(linear: LinearShape) -> Factors:
        return Factors(zeros[: linear.k].view(-1, 1), zeros[: linear.n].view(1, -1))

    layer = {name: tuple(map(factors, group)) for name, group in groups.items()}
    return (layer,) * layers


def transposed(adapter: Sequence[LayerFactors]) -> tuple[LayerFactors, ...]:
    """Return the factors as PEFT and vLLM keep them: A [rank, k] and B [n, rank]."""

    def transpose(factors: Factors) -> Factors:
        return Factors(factors.a.t().contiguous(), factors.b.t().contiguous())

    return tuple(
        {name: tuple(map(transpose, group)) for name, group in layer.items()} for layer in adapter
    )


def transposed_stacks(stacks: Sequence[LayerStacks]) -> tuple[LayerStacks, ...]:
    """Return the slots as vLLM keeps them: A [slots, rank, k] and B [slots, n, rank]; no zeros."""

    def transpose(stack: Stack) -> Stack:
        return Stack(stack.a[:-1].mT.contiguous(), stack.b[:-1].mT.contiguous())

    return tuple(
        {name: tuple(map(transpose, group)) for name, group in layer.items()} for layer in stacks
    )
