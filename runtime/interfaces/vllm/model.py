"""vLLM's `LoRAModel`: a numbered adapter, and the weights of its layers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trt_lora.plugins.checked import check_items, checked
from trt_lora.plugins.contract.modules import MODULES, parts_of
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import Pair, weight_of
from trt_lora.runtime.interfaces.vllm.layer_weights import (
    LoRALayerWeights,
    PackedLoRALayerWeights,
)
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

LayerWeights = LoRALayerWeights | PackedLoRALayerWeights

PART_SUFFIXES = {module.name: module.suffixes[0] for module in MODULES if module.suffixes}
"""Last part of a module's path, by TensorRT-LLM's name."""


@short_repr
@dataclass(frozen=True, eq=False)
class LoRAModel:
    """An adapter with a number; of a file, it is opened and read when its layers are asked for."""

    id: int
    adapter: Adapter
    name: str = ""  # what `AdapterStore` calls it; by default "lora <id>"
    path: Path | None = None  # of its files; None: its weights are in memory alone

    def __post_init__(self) -> None:
        """Check the number.

        Raises:
            AdapterError: (a ValueError) it is below 1.
        """
        if self.id < 1:
            raise AdapterError(f"id must be > 0, got {self.id}")

    @classmethod
    @checked
    def of_layers(cls, id: int, loras: Mapping[str, LayerWeights], name: str = "") -> "LoRAModel":
        """Return a model of layers in memory, by the path of their module."""
        pairs: dict[str, Pair] = {}
        for path, layer in loras.items():
            pairs |= _pairs(path, layer)
        return cls(id, Adapter.of_pairs(name or f"LoRA {id}", pairs), name)

    @classmethod
    @checked
    def from_local_checkpoint(
        cls,
        lora_dir: str | Path,
        expected_lora_modules: Collection[str] | None = None,
        *,
        lora_model_id: int,
        name: str = "",
        manifest: Manifest | None = None,
    ) -> "LoRAModel":
        """Open an adapter; see `load_adapter` for what it may be.

        Args:
            lora_dir: a directory or a file.
            expected_lora_modules: last parts of the paths that it may adapt; None is any.
            lora_model_id: its number, from 1.
            name: what `AdapterStore` is to call it.
            manifest: of the engine; TensorRT-LLM's format needs it.

        Raises:
            FileNotFoundError: there is nothing at the path.
            AdapterError: (a ValueError) it is no adapter, or adapts other modules.
        """
        if expected_lora_modules is not None:
            check_items("expected_lora_modules", expected_lora_modules, str)
        path = Path(lora_dir)
        if not path.exists():
            raise FileNotFoundError(f"the LoRA path {path} does not exist")
        adapter = load_adapter(path, manifest)
        found = sorted({site.rpartition(".")[2] for site in adapter.ranks})
        if expected_lora_modules is not None and not {*found} <= {*expected_lora_modules}:
            raise AdapterError(
                f"While loading {path}, expected target modules in "
                f"{listed(sorted(expected_lora_modules))} but received {listed(found)}. Please "
                "verify that the loaded LoRA module is correct"
            )
        return cls(lora_model_id, adapter, name, path)

    @property
    def adapter_name(self) -> str:
        """What `AdapterStore` calls it."""
        return self.name or f"lora {self.id}"

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(self.adapter.ranks.values(), default=0)

    @property
    def scaling(self) -> float:
        """The scale of all layers.

        Raises:
            AdapterError: they have different ones; ask each of `loras`.
        """
        scales = {b.scale for _, b in self.adapter.pairs().values()}
        if len(scales) != 1:
            raise AdapterError(f"LoRA {self.id} has {len(scales)} scales; ask its layers")
        return scales.pop()

    @cached_property
    def loras(self) -> dict[str, LayerWeights]:
        """The layers by the path of their module, read into memory.

        Raises:
            AdapterError: a value is not finite, or the file changed.
        """
        return {
            path: LoRALayerWeights(a.values(), replace(b, scale=1.0).values(), b.scale)
            for path, (a, b) in self.adapter.pairs().items()
        }

    @property
    def extra_vocab_size(self) -> int:
        """Always 0: an adapter that brings tokens is refused by name."""
        return 0

    @checked
    def get_lora(self, module_name: str) -> LayerWeights | None:
        """Return the weights of a module, by its path; None if it is not adapted."""
        return self.loras.get(module_name)

    @checked
    def check_lora_name(self, lora_name: str) -> bool:
        """Return whether a module is adapted, by its path."""
        return lora_name in self.adapter.ranks

    @checked
    def clone(self, lora_model_id: int) -> "LoRAModel":
        """Return the same adapter under another number; the weights are shared."""
        return replace(self, id=lora_model_id, name="")

    def optimize(self) -> "LoRAModel":
        """Return the same with scales folded into B; in place in vLLM, and at load here."""
        layers = {path: layer.optimize() for path, layer in self.loras.items()}
        return self.of_layers(self.id, layers, self.name)


def _pairs(path: str, layer: LayerWeights) -> dict[str, Pair]:
    """A and B by path; a packed layer is its parts beside it."""
    if isinstance(layer, LoRALayerWeights):
        return {path: _pair(path, layer)}
    names = parts_of(path)
    if len(names) != len(layer.parts):
        raise AdapterError(f"{path} has {len(names) or 'no'} parts, these are {len(layer.parts)}")
    parent = path.rpartition(".")[0]
    parts = zip(names, layer.parts, strict=True)
    found = {f"{parent}.{PART_SUFFIXES[name]}": part for name, part in parts if part is not None}
    return {at: _pair(at, part) for at, part in found.items()}


def _pair(path: str, layer: LoRALayerWeights) -> Pair:
    a, b = (tensor_from_numpy(_own(array)) for array in (layer.lora_a, layer.lora_b))
    return weight_of(f"{path}.lora_a", a), weight_of(f"{path}.lora_b", b).times(layer.scaling)


def _own(array: Array) -> Array:
    """A copy that nobody else writes to."""
    return np.array(array, order="C")
