"""Shared state of the workloads: device, model shapes and weights, the adapter in use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.scripts.bench.gpu.device import Device, Replay
from trt_lora.scripts.bench.gpu.elementwise_kernels import Tensors
from trt_lora.scripts.bench.gpu.layers.decoder_layers import Weights, layer_bytes, random_weights
from trt_lora.scripts.bench.gpu.layers.random_adapters import (
    LayerFactors,
    random_adapter,
    transposed,
)
from trt_lora.scripts.bench.gpu.layers.vllm_kernels import VllmOperators, load_vllm
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B, ModelShape
from trt_lora.scripts.measuring.turns import ROUNDS, Times, alternate

ROOM_BYTES = 8 << 30  # for adapters in both layouts, activations and graphs
H200 = Chip((9, 0), 132)


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    rounds: int = ROUNDS  # of every version of a row
    warm_up: int = 3  # rounds that are not counted
    vllm: Path | None = None  # vLLM's folder lora/ops/triton_ops
    model: ModelShape = LLAMA_3_8B
    chip: Chip = H200  # what is predicted for
    l2_bytes: int = 60 << 20


@dataclass
class Bench:
    """Makes what is large once, and forgets an adapter when another one is wanted."""

    device: Device
    options: Options = field(default_factory=Options)
    _weights: Weights | None = None
    _adapter: "AdapterPair | None" = None

    @property
    def model(self) -> ModelShape:
        """The shapes, with as many layers as there is memory for."""
        return replace(self.options.model, layers=len(self.weights.layers))

    @property
    def weights(self) -> Weights:
        """The base model."""
        if self._weights is None:
            self._weights = random_weights(self.device, self._fitting())
        return self._weights

    def adapter(self, rank: int) -> "AdapterPair":
        """Return an adapter of that rank on every linear, in both layouts."""
        if self._adapter is None or self._adapter.rank != rank:
            self._adapter = None  # before the next one takes its memory
            groups, layers = self.model.groups, self.model.layers
            ours = random_adapter(self.device, groups, rank, layers)
            self._adapter = AdapterPair(rank, ours, transposed(ours))
        return self._adapter

    def vllm(self) -> VllmOperators:
        """Return vLLM's operators, with empty tables.

        Raises:
            ConfigError: there is no folder, or it is not what was hoped for.
        """
        if self.options.vllm is None:
            raise ConfigError("vLLM is not installed, and no folder was given with --vllm")
        operators = load_vllm(self.options.vllm)
        operators.forget()
        return operators

    def time(self, replays: Mapping[str, Replay]) -> Times:
        """Time versions against each other, after rounds that bring the clock up."""
        names = list(replays)

        def sample(order: Sequence[str]) -> Sequence[float]:
            return self.device.times_us([replays[name] for name in order])

        for _ in range(self.options.warm_up):
            sample(names)
        return alternate(names, sample, self.options.rounds)

    def _fitting(self) -> ModelShape:
        model = self.options.model
        layers = int(max(self.device.free_bytes() - ROOM_BYTES, 0) // layer_bytes(model))
        return replace(model, layers=max(1, min(model.layers, layers)))


@dataclass(frozen=True)
class AdapterPair:
    """An adapter in our layout, and in PEFT's and vLLM's."""

    rank: int
    ours: tuple[LayerFactors, ...]
    transposed: tuple[LayerFactors, ...]


def difference(ours: Tensors, theirs: Tensors) -> float:
    """Return the worst ||ours - theirs|| / ||theirs||: do two versions compute the same?"""

    def relative(one: torch.Tensor, other: torch.Tensor) -> float:
        exact = other.double()
        return float((one.double() - exact).norm() / exact.norm())

    return max(relative(one, other) for one, other in zip(ours, theirs, strict=True))
