"""Contract between engine and adapter: binding names, sites and rank limits.

y + (x @ A) @ B        A [k, r], B [r, n], the adapter's scale already folded into B

A site of experts has a pair for each of them, A [E, k, r] and B [E, r, n] of one rank, and a token
takes those of the experts that its router chooses.

An engine with vectors computes (y + (x @ A) @ B) * scale + bias at every site, both [n], and adds
the base model's own bias behind that.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from trt_lora.plugins.contract.modules import MODULES, Module, is_embedding, module_of

__all__ = [
    "FACTORS",
    "MAX_RANK",
    "MAX_SITES",
    "MIN_RANK",
    "MODULES",
    "RANK_MULTIPLE",
    "VECTORS",
    "BindingNames",
    "Factor",
    "Module",
    "Site",
    "layer_of",
    "parse_binding",
    "split_at_layer",
]

MIN_RANK = 1  # what a dummy has: engines do not agree on empty tensors, so never 0
MAX_RANK = 512  # the largest rank that the kernels and the profiles are made for
RANK_MULTIPLE = 8  # ranks of which the kernels load 16 bytes at a time, in every dtype
MAX_SITES = 8  # of a group: sites that read the same x and share a launch
_MOST_DIGITS = 9  # of a layer's number; int() refuses what a file's name may hold

Factor = Literal["A", "B", "scale", "bias", "magnitude", "trained_bias"]
FACTORS: tuple[Factor, Factor] = ("A", "B")
VECTORS: tuple[Factor, Factor] = ("scale", "bias")  # [n]; without an adapter ones and zeros
MAGNITUDE: Factor = "magnitude"  # [n], DoRA's, of an adapter; divided by norms it is a scale
TRAINED_BIAS: Factor = "trained_bias"  # [n], an adapter's; without the base's own it is a bias


def dummy_value(factor: Factor) -> int:
    """Return what the dummy of a factor holds: 1 for a scale, otherwise 0."""
    return int(factor == "scale")


class BindingNames(StrEnum):
    """Spelling of an engine's LoRA inputs."""

    LORA = "lora"
    EDGELLM = "edgellm"

    def binding(self, factor: Factor, path: str) -> str:
        """Return the engine input of a factor at the site `path`."""
        if self is BindingNames.LORA:
            return f"lora_{factor}_{path}"
        return f"{path}.lora_{factor}.weight"

    def pair(self, path: str) -> tuple[str, str]:
        """Return the engine inputs of A and B at the site `path`."""
        return self.binding("A", path), self.binding("B", path)

    def rank_symbol(self, path: str) -> str:
        """Return the symbolic dimension of the site's rank.

        Each site has its own: TensorRT holds equally named dimensions equal, and an adapter may
        have another rank at every site.
        """
        return f"rank_{path}" if self is BindingNames.LORA else f"{path}.rank"


_FACTORS: dict[str, Factor] = {name: name for name in (*FACTORS, *VECTORS, MAGNITUDE, TRAINED_BIAS)}
_NAMES = "|".join(_FACTORS)
_SPELLINGS = (
    re.compile(rf"lora_(?P<factor>{_NAMES})_(?P<path>.+)"),
    re.compile(rf"(?P<path>.+)\.lora_(?P<factor>{_NAMES})\.weight"),
)


def parse_binding(name: str) -> tuple[Factor, str] | None:
    """Return (factor, site path) of a LoRA binding in either spelling, or None."""
    for spelling in _SPELLINGS:
        if match := spelling.fullmatch(name):
            return _FACTORS[match["factor"]], match["path"]
    return None


def layer_of(path: str) -> int | None:
    """Return the number of a module's layer, the first integer in its path, or None."""
    return split_at_layer(path)[1]


def split_at_layer(path: str) -> tuple[str, int | None, str]:
    """Return what is before a module's layer, the layer's number, and the module's path in it.

    `model.layers.0.mlp.up_proj` is `model.layers`, 0 and `mlp.up_proj`; outside the layers, a path
    is the last of the three.
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal() and len(part) <= _MOST_DIGITS:
            return ".".join(parts[:i]), int(part), ".".join(parts[i + 1 :])
    return "", None, path


def path_in_layer(path: str) -> str:
    """Return a module's path below its layer, the same in every layer: `self_attn.q_proj`."""
    return split_at_layer(path)[2]


@dataclass(frozen=True)
class Site:
    """One linear of the graph that takes LoRA: `y [..., n] = x [..., k] @ W`."""

    path: str  # the module's path in the base model, e.g. model.layers.0.self_attn.q_proj
    k: int
    n: int
    dtype: str  # of A, B and the activation, e.g. float16
    parts: tuple[int, ...] = ()  # widths of a fused linear's outputs, e.g. q, k and v; sum: n
    experts: int = 0  # E, each with a matrix of its own; 0: a linear

    @property
    def module(self) -> Module | None:
        """The target module of this linear; None if the module table does not list it."""
        return module_of(self.path)

    @property
    def width(self) -> int:
        """The size of the model's activations, of an embedding or an output head."""
        return self.n if is_embedding(self.path) else self.k

    @property
    def layer(self) -> int | None:
        """The number of the layer; None outside the layers."""
        return layer_of(self.path)

    def shape(self, factor: Factor, rank: int) -> tuple[int, ...]:
        """Return A's [k, r], B's [r, n] or a vector's [n]; of experts [E, k, r] and [E, r, n]."""
        matrix = {"A": (self.k, rank), "B": (rank, self.n)}.get(factor)
        if matrix is None:
            return (self.n,)
        return (self.experts, *matrix) if self.experts else matrix
