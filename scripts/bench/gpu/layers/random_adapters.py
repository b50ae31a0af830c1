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


# Of one layer, by group, in the order of the group's linears.
LayerFactors = Mapping[str, tuple[Factors, ...]]
Groups = Mapping[str, tuple[LinearShape, ...]]


def random_adapter(
    device: Device, groups: Groups, rank: int, layers: int
) -> tuple[LayerFactors, ...]:
    """Return an adapter whose deltas are about half as large as what they are added to."""

    def factors(linear: LinearShape) -> Factors:
        a = device.random(linear.k, rank, scale=linear.k**-0.5)
        return Factors(a, device.random(rank, linear.n, scale=0.5 * rank**-0.5))

    return tuple(
        {name: tuple(factors(linear) for linear in group) for name, group in groups.items()}
        for _ in range(layers)
    )


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
