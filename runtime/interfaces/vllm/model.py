"""vLLM's `LoRAModel`, a numbered adapter, and `LoRALayerWeights`, those of one linear layer."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trt_lora.plugins.checked import check_items, checked
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import Pair, weight_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array, Float32
from trt_lora.runtime.memory.tensor import tensor_from_numpy


@short_repr
@dataclass(frozen=True, eq=False)
class LoRALayerWeights:
    """y + scaling * (x @ A) @ B; vLLM's `embeddings_tensor` and `bias` are refused at load."""

    lora_a: Array  # [in, rank]
    lora_b: Array  # [rank, out]
    scaling: float = 1.0

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            AdapterError: these are no two matrices of one rank.
        """
        a, b = self.lora_a.shape, self.lora_b.shape
        if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
            raise AdapterError(
                f"lora_a has shape {list(a)} and lora_b {list(b)}, expected [in, rank] and "
                "[rank, out]"
            )

    @property
    def rank(self) -> int:
        """The number of A's columns."""
        return int(self.lora_a.shape[1])

    def optimize(self) -> "LoRALayerWeights":
        """Return the same with the scale folded into B, in float32; in place in vLLM."""
        if self.scaling == 1:
            return self
        scaled = self.lora_b.astype(np.float32) * np.float32(self.scaling)
        return replace(self, lora_b=scaled, scaling=1.0)

    def compute_delta_weight(self) -> Float32:
        """Return scaling * A @ B, [in, out], what the layer adds to its weight."""
        a, b = self.lora_a.astype(np.float32), self.lora_b.astype(np.float32)
        return np.float32(self.scaling) * (a @ b)


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
    def of_layers(
        cls, id: int, loras: Mapping[str, LoRALayerWeights], name: str = ""
    ) -> "LoRAModel":
        """Return a model of layers in memory, by the path of their module."""
        pairs = {path: _pair(path, layer) for path, layer in loras.items()}
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
    def loras(self) -> dict[str, LoRALayerWeights]:
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
    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
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


def _pair(path: str, layer: LoRALayerWeights) -> Pair:
    """A and B in copies that nothing else writes to."""
    a, b = (tensor_from_numpy(np.array(f, order="C")) for f in (layer.lora_a, layer.lora_b))
    return weight_of(f"{path}.lora_a", a), weight_of(f"{path}.lora_b", b).times(layer.scaling)
