"""Sites without an adapter, whose products ONNX Runtime skips.

Whoever binds a dummy sees rank 1. ONNX Runtime is given nothing in its place where its graph has a
default for the input, of rank 0: a product of nothing is the same zero.
"""

from collections.abc import Collection, Iterable

from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import TensorMap, ZeroMemory


class SkippedDummies:
    """The LoRA inputs of a graph that have a default, in pairs."""

    def __init__(self, manifest: Manifest, optional: Collection[str]) -> None:
        """Pair A and B of every site.

        Args:
            manifest: of the engine.
            optional: inputs that have a default.
        """
        self._partners: dict[str, str] = {}
        for site in manifest.sites:
            a, b = manifest.binding_names.pair(site.path)
            if a in optional and b in optional:
                self._partners |= {a: b, b: a}

    def with_partners(self, names: Iterable[str]) -> Collection[str]:
        """Return inputs and their partners, each once: a pair is skipped or bound together."""
        changed = dict.fromkeys(names)
        return changed | {self._partners[name]: None for name in changed if name in self._partners}

    def skips(self, name: str, tensor_map: TensorMap) -> bool:
        """Whether an input and its partner are dummies."""
        if name not in self._partners:
            return False
        pair = tensor_map[name], tensor_map[self._partners[name]]
        return all(isinstance(tensor.owner, ZeroMemory) for tensor in pair)
