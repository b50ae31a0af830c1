"""LoRA methods of other projects: PEFT's layer, vLLM's kernels, torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trt_lora.scripts.bench.gpu.device import Device
from trt_lora.scripts.bench.gpu.elementwise_kernels import Tensors
from trt_lora.scripts.bench.gpu.layers.decoder_layers import columns
from trt_lora.scripts.bench.gpu.layers.lora_methods import LoraMethod
from trt_lora.scripts.bench.gpu.layers.random_adapters import (
    Groups,
    LayerFactors,
    LayerStacks,
    Stack,
)
from trt_lora.scripts.bench.gpu.layers.vllm_kernels import VllmOperators


def peft(device: Device, groups: Groups, adapter: Sequence[LayerFactors]) -> LoraMethod:
    """Return PEFT's own forward; its base layer answers with what the chain has computed.

    Args:
        device: where the chain runs.
        groups: the linears.
        adapter: the factors as PEFT keeps them, transposed; one rank everywhere.
    """
    layers = _peft_layers(device, groups, _rank(adapter))

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        linears = groups[group]
        parts = columns(y, [linear.n for linear in linears])
        outputs = []
        for linear, part, factors in zip(linears, parts, adapter[layer][group], strict=True):
            lora = layers[linear.name]
            lora.base_layer.answer = part
            lora.lora_A["default"].weight.data = factors.a
            lora.lora_B["default"].weight.data = factors.b
            outputs.append(lora(x))
        return outputs

    return add


class _Answer(torch.nn.Linear):
    """A linear whose product has been computed already."""

    answer: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        return self.answer


def _peft_layers(device: Device, groups: Groups, rank: int) -> dict[str, Any]:
    """One of PEFT's layers for each linear of a layer; weights are put in later."""
    from peft import LoraConfig, inject_adapter_in_model

    bases = torch.nn.Module()
    linears = [linear for group in groups.values() for linear in group]
    for linear in linears:
        base = _Answer(1, 1, bias=False, device=device.where, dtype=device.dtype)
        base.in_features, base.out_features = linear.k, linear.n
        bases.add_module(linear.name, base)
    names = [linear.name for linear in linears]
    # alpha = rank: the scale is 1, and multiplied by nevertheless, as always in PEFT.
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, init_lora_weights=False)
    inject_adapter_in_model(config, bases)
    return {name: bases.get_submodule(name).eval() for name in names}


def vllm(
    device: Device,
    groups: Groups,
    adapter: Sequence[LayerFactors],
    operators: VllmOperators,
    m: int,
) -> LoraMethod:
    """Return vLLM's kernels in their own configuration: clear, shrink, expand for each group.

    Args:
        device: where the chain runs.
        groups: the linears.
        adapter: the factors as vLLM keeps them, transposed.
        operators: what `load_vllm` found.
        m: rows, all of one adapter.
    """
    stacks = [
        {name: tuple(Stack(f.a[None], f.b[None]) for f in group) for name, group in layer.items()}
        for layer in adapter
    ]
    return vllm_by_rows(device, groups, stacks, operators, [0] * m)


def vllm_by_rows(
    device: Device,
    groups: Groups,
    stacks: Sequence[LayerStacks],
    operators: VllmOperators,
    rows: Sequence[int],
) -> LoraMethod:
    """Return vLLM's kernels where each row takes its own adapter.

    Args:
        device: where the chain runs.
        groups: the linears.
        stacks: of every layer, in vLLM's layout; one rank everywhere.
        operators: what `load_vllm` found.
        rows: the slot of each; -1 is the base model.
    """
    slots, rank, _ = next(iter(stacks[0].values()))[0].a.shape
    m, routes = len(rows), operators.route(rows, slots, device.where)
    buffers = {
        name: torch.zeros(len(group), m, rank, dtype=torch.float32, device=device.where)
        for name, group in groups.items()
    }

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        of_group = stacks[layer][group]
        operators.shrink(x, [stack.a for stack in of_group], buffers[group], routes)
        operators.expand(buffers[group], [stack.b for stack in of_group], y, routes)
        return columns(y, [linear.n for linear in groups[group]])

    return add


def _rank(adapter: Sequence[LayerFactors]) -> int:
    return next(iter(adapter[0].values()))[0].a.shape[0]


def compiled_pair(groups: Groups, adapter: Sequence[LayerFactors]) -> LoraMethod:
    """Return what torch.compile makes of `y + (x @ A) @ B`, a group at a time; takes seconds."""

    def pairs(x: torch.Tensor, parts: Tensors, a: Tensors, b: Tensors) -> list[torch.Tensor]:
        rows = zip(parts, a, b, strict=True)
        return [y + (x @ each_a) @ each_b for y, each_a, each_b in rows]

    compiled: Callable[..., list[torch.Tensor]] = torch.compile(pairs, dynamic=False)

    def add(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        factors = adapter[layer][group]
        parts = columns(y, [linear.n for linear in groups[group]])
        return compiled(x, parts, [f.a for f in factors], [f.b for f in factors])

    return add
