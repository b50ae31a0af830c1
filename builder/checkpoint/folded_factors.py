"""Factors that AWQ has divided x by, found from the original model; adapters in those terms.

AWQ divides a norm, and the rows of v and of up, by factors, and multiplies the columns of what
reads them: https://arxiv.org/abs/2306.00978. No file has the factors. Those of a norm are read off;
those of rows are found by least squares, which the rounding to 4 bits moves by a thousandth.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.stored_linears import StoredLinears, dense, stored_linears
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.hub_cache import model_name
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, Float32

_BEHIND_NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_BEHIND_ROWS = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}
_FARTHEST = 0.3  # of a weight's norm: 4 bits are off by 0.1, another model by 1.4
_EQUAL = 0.01  # rows that were not divided are off by less


@dataclass(frozen=True, eq=False)
class Folded:
    """The factors of one linear: it reads x / `x` and makes y / `y`."""

    x: torch.Tensor  # float32 [k]
    y: torch.Tensor  # float32 [n]


def folded_factors(original: Checkpoint, quantised: Checkpoint) -> dict[str, Folded]:
    """Return the factors of every linear that may have some, by its path.

    Raises:
        ModelError: the one is no quantised model with Llama's modules, or not of the other.
    """
    pair = _Pair(_Weights(original), _Weights(quantised))
    return {path: factors for layer in pair.layers() for path, factors in pair.factors(layer)}


def rescaled(adapter: Adapter, original: Path, quantised: Path) -> Adapter:
    """Return an adapter of the original as one of the quantised model, which it then names.

    Raises:
        ModelError: the one is no quantised model with Llama's modules, or not of the other.
        AdapterError: a factor is missing from its pair.
    """
    factors, pairs = folded_factors(Checkpoint(original), Checkpoint(quantised)), adapter.pairs()
    for path, (a, b) in pairs.items():
        if (own := factors.get(path)) is not None:
            pairs[path] = _times(a, own.x[:, None]), _times(b, 1 / own.y)
    weights, name = Adapter.of_pairs(adapter.source, pairs).weights, model_name(quantised.resolve())
    return replace(adapter, weights=weights, base_model=name, base_fingerprint=None)


def _times(weight: Weight, factors: torch.Tensor) -> Weight:
    numbers: Float32 = factors.numpy()

    def read(buffer: ReadBuffer | None = None) -> Array:
        return weight.values(buffer) * numbers

    return replace(weight, read=read, dtype="float32", scale=1.0, tensor=None)


@dataclass(frozen=True)
class _Weights:
    """The weights of a checkpoint in floats, read when they are asked for."""

    checkpoint: Checkpoint

    @cached_property
    def stored(self) -> StoredLinears | None:
        """Its linears in codes."""
        return stored_linears(self.checkpoint)

    def __getitem__(self, path: str) -> torch.Tensor:
        """Return the weight of a module, in float32."""
        if self.stored is not None and path in self.stored.paths:
            return dense(self.stored.weight(path)).float()
        name = f"{path}.weight"
        if name in self.checkpoint.homes:
            return self.checkpoint.tensor(name).float()
        raise ModelError(
            f"{self.checkpoint.directory} has no {name}; factors are found in models with the "
            "modules of Llama, Mistral or Qwen"
        )


@dataclass(frozen=True)
class _Pair:
    original: _Weights
    quantised: _Weights

    def layers(self) -> list[str]:
        """Return the paths of the decoder's layers."""
        end = ".input_layernorm.weight"
        names = [weight.name for weight in self.quantised.checkpoint.weights]
        return [name.removesuffix(end) for name in names if name.endswith(end)]

    def factors(self, layer: str) -> Iterator[tuple[str, Folded]]:
        """Yield the factors of a layer's linears."""
        for norm, names in _BEHIND_NORMS.items():
            before, after = (side[f"{layer}.{norm}"] for side in (self.original, self.quantised))
            x = torch.where(after == 0, 1.0, before / after)
            for name in names:
                y = self._rows(f"{layer}.{name}", x, is_divided=name in _BEHIND_ROWS)
                yield f"{layer}.{name}", Folded(x, y)
                if (behind := _BEHIND_ROWS.get(name)) is not None:
                    yield f"{layer}.{behind}", self._behind(f"{layer}.{behind}", y)

    def _rows(self, path: str, x: torch.Tensor, *, is_divided: bool) -> torch.Tensor:
        """What the rows [n] of a linear have been divided by, in front of which x [k] has been."""
        expected, found = self.original[path] * x, self.quantised[path]
        y = torch.ones(len(found))
        if is_divided:
            shares = (expected * found).sum(1) / expected.square().sum(1).clamp_min(1e-30)
            is_equal = (shares - 1).abs().median() < _EQUAL
            y = y if is_equal else 1 / torch.where(shares == 0, 1.0, shares)
        self._check(path, expected / y[:, None], found)
        return y

    def _behind(self, path: str, y: torch.Tensor) -> Folded:
        """The factors of the linear that reads what rows have made, each for several heads."""
        expected, found = self.original[path], self.quantised[path]
        n, k = found.shape
        heads = int(self.quantised.checkpoint.fields.get("num_key_value_heads", 1))
        x = y if len(y) == k else y.reshape(heads, 1, -1).repeat(1, k // len(y), 1).reshape(k)
        self._check(path, expected * x, found)
        return Folded(x, torch.ones(n))

    def _check(self, path: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        error = float((found - expected).norm() / expected.norm())
        if not error < _FARTHEST:
            names = [side.checkpoint.directory for side in (self.quantised, self.original)]
            raise ModelError(
                f"{path} of {names[0]} is off by {error:.2f} of its norm from that of {names[1]}: "
                "it was not quantised from this model"
            )
