"""Contract between engine and adapter: binding names, sites and rank limits.

y + (x @ A) @ B        A [k, r], B [r, n], the adapter's scale already folded into B
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from trt_lora.plugins.contract.modules import MODULES, Module, module_of

__all__ = [
    "FACTORS",
    "MAX_RANK",
    "MAX_SITES",
    "MIN_RANK",
    "MODULES",
    "RANK_MULTIPLE",
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

Factor = Literal["A", "B"]
FACTORS: tuple[Factor, Factor] = ("A", "B")


class BindingNames(StrEnum):
    """Spelling of an engine's LoRA inputs."""

    LORA = "lora"
    EDGELLM = "edgellm"

    def binding(self, factor: Factor, path: str) -> str:
        """Return the engine input of factor A or B at the site `path`."""
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


_SPELLINGS = (
    re.compile(r"lora_(?P<factor>[AB])_(?P<path>.+)"),
    re.compile(r"(?P<path>.+)\.lora_(?P<factor>[AB])\.weight"),
)


def parse_binding(name: str) -> tuple[Factor, str] | None:
    """Return (factor, site path) of a LoRA binding in either spelling, or None."""
    for spelling in _SPELLINGS:
        if match := spelling.fullmatch(name):
            return ("A" if match["factor"] == "A" else "B"), match["path"]
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


@dataclass(frozen=True)
class Site:
    """One linear of the graph that takes LoRA: `y [..., n] = x [..., k] @ W`."""

    path: str  # the module's path in the base model, e.g. model.layers.0.self_attn.q_proj
    k: int
    n: int
    dtype: str  # of A, B and the activation, e.g. float16
    parts: tuple[int, ...] = ()  # widths of a fused linear's outputs, e.g. q, k and v; sum: n

    @property
    def module(self) -> Module | None:
        """The target module of this linear; None if the module table does not list it."""
        return module_of(self.path)

    @property
    def layer(self) -> int | None:
        """The number of the layer; None outside the layers."""
        return layer_of(self.path)

    def shape(self, factor: Factor, rank: int) -> tuple[int, int]:
        """Return A's [k, r] or B's [r, n]."""
        return (self.k, rank) if factor == "A" else (rank, self.n)
