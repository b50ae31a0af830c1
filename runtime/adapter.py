"""An adapter in canonical form: A [k, r] and B [r, n] per site, the scale folded into B."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from trt_lora.plugins.contract import parse_binding
from trt_lora.runtime.tensors import Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """Immutable weights by binding name, in the dtypes of their source.

    Names that neither spelling of the contract explains are kept as they are: an engine may use
    any names it likes.
    """

    source: str  # where the weights came from, for messages
    tensors: Mapping[str, Tensor]
    base_model: str | None = None  # the name that the adapter's config gives
    owned: bool = True  # False: memory of another library, taken in place or not at all

    def __post_init__(self) -> None:
        """Freeze the mapping."""
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Rank of every site, by its path, read from A's shape [k, r]."""
        return {
            path: tensor.shape[1]
            for factor, path, tensor in self._by_site()
            if factor == "A" and len(tensor.shape) == 2
        }

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over names, dtypes, shapes and elements: equal exactly for equal weights.

        Raises:
            TensorError: the weights are not in host memory.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
            digest.update(tensor.storage().data)
        return digest.hexdigest()

    def _by_site(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, tensor in self.tensors.items():
            if parsed := parse_binding(name):
                yield *parsed, tensor
