"""Sites without an adapter, whose products ONNX Runtime skips.

Whoever binds a dummy sees rank 1. ONNX Runtime is given rank 0 in its place: a product of nothing
is the same zero, and costs a third of the time.
"""

from collections.abc import Iterable
from dataclasses import replace

from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, ZeroMemory


class SkippedDummies:
    """The LoRA inputs of an engine for one adapter at a time, in pairs."""

    def __init__(self, manifest: Manifest) -> None:
        """Pair A and B of every site; an engine for many adapters has stacks, and no dummies."""
        self._partners: dict[str, str] = {}
        self._rank_axes: dict[str, int] = {}
        for site in () if manifest.max_loras else manifest.sites:
            a, b = manifest.binding_names.pair(site.path)
            self._partners |= {a: b, b: a}
            self._rank_axes |= {a: 1, b: 0}

    def with_partners(self, names: Iterable[str]) -> Iterable[str]:
        """Return inputs and their partners, each once: a pair is skipped or bound together."""
        changed = dict.fromkeys(names)
        return changed | {self._partners[name]: None for name in changed if name in self._partners}

    def skipped(self, name: str, tensor_map: TensorMap) -> Tensor:
        """Return what to bind to an input: rank 0 where it and its partner are dummies."""
        tensor = tensor_map[name]
        pair = [tensor, tensor_map[self._partners[name]]] if name in self._partners else []
        if not pair or not all(isinstance(one.owner, ZeroMemory) for one in pair):
            return tensor
        shape = list(tensor.shape)
        shape[self._rank_axes[name]] = 0
        return replace(tensor, shape=tuple(shape))
