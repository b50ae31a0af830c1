"""Adapter in canonical form: A [k, r] and B [r, n] per site, with B's scale kept separately."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.sites import FACTORS, BindingNames, Factor, parse_binding
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.short_repr import clipped, short_value
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Pair, Weight, weight_of
from trt_lora.runtime.files.base_weights import BaseCopy


@dataclass(frozen=True, eq=False)
class Adapter:
    """Immutable weights by binding name, read from their source when they are needed.

    Names that neither spelling of the contract explains are kept as they are: an engine may use
    any names it likes.
    """

    source: str  # where the weights came from, for messages
    weights: Mapping[str, Weight]
    base_model: str | None = None  # the name that the adapter's config gives
    base_fingerprint: str | None = None  # that of the engine it was converted for
    unusable_keys: Mapping[str, str] = field(default_factory=dict)  # tensor -> why no engine has it
    base_copies: Mapping[str, BaseCopy] = field(default_factory=dict)  # of unusable_keys: tensor ->
    # what an engine may find to be its base model's own, and then passes over
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor -> why PEFT does not apply it
    targets: Callable[[str], bool | None] | None = None  # what its config says of a path, if it can
    warnings: tuple[str, ...] = ()  # what its file alone makes suspicious, a line each
    owned: bool = True  # False: memory of another library, taken in place or not at all

    def __post_init__(self) -> None:
        """Freeze the mappings."""
        for name in ("weights", "unusable_keys", "base_copies", "ignored"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __repr__(self) -> str:
        """Return where it is from, and how many tensors it has."""
        return clipped(f"<Adapter {short_value(self.source)}: {len(self.weights)} tensors>")

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Rank of every site, by its path, read from A's shape [k, r]."""
        return {
            parsed[1]: weight.shape[1]
            for name, weight in self.weights.items()
            if (parsed := parse_binding(name)) and parsed[0] == "A" and len(weight.shape) == 2
        }

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over names, dtypes, shapes and values: equal exactly for equal weights.

        Raises:
            AdapterError: the file changed since the adapter was opened.
        """
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights.items()):
            digest.update(f"{name}\0{weight.dtype}\0{weight.shape}\0".encode())
            digest.update(weight.values().tobytes())
        return digest.hexdigest()

    @classmethod
    @checked
    def of_pairs(
        cls, source: str, pairs: Mapping[str, Pair], base_model: str | None = None
    ) -> "Adapter":
        """Return an adapter from A and B of every site, by its path."""
        weights = {
            name: weight
            for path, pair in pairs.items()
            for name, weight in zip(BindingNames.LORA.pair(path), pair, strict=True)
        }
        return cls(source, weights, base_model)

    def pairs(self) -> dict[str, Pair]:
        """Return A and B of every site, by its path.

        Raises:
            AdapterError: a name is no binding's, or a factor is missing from its pair.
        """
        found: dict[str, dict[Factor, Weight]] = {}
        for name, weight in self.weights.items():
            if (parsed := parse_binding(name)) is None:
                raise AdapterError(f"{self.source}: {name!r} is not the name of a LoRA binding")
            found.setdefault(parsed[1], {})[parsed[0]] = weight
        for path, both in found.items():
            if missing := [factor for factor in FACTORS if factor not in both]:
                raise AdapterError(f"{self.source}: {path} has no {missing[0]}")
        return {path: (both["A"], both["B"]) for path, both in found.items()}

    def check_usable(self) -> None:
        """Refuse an adapter with a tensor that no engine can take, whatever its base model.

        Raises:
            AdapterError: it has one.
        """
        for name, reason in self.unusable_keys.items():
            if name not in self.base_copies:
                raise AdapterError(f"{self.source}: {name} cannot be used: {reason}")

    def in_memory(self) -> "Adapter":
        """Return the same adapter read whole, so that its files may change: B scaled, in float32.

        Raises:
            AdapterError: a value is not finite, or a weight is no matrix.
        """
        for weight in self.weights.values():
            if len(weight.shape) != 2:
                name, shape = ", ".join(weight.names), list(weight.shape)
                raise AdapterError(f"{self.source}: {name} has shape {shape}, expected a matrix")
        for copy in self.base_copies.values():
            copy.sha256  # noqa: B018 - it is kept
        kept = {n: w for n, w in self.weights.items() if w.tensor is not None and w.scale == 1}
        read = {n: w for n, w in self.weights.items() if n not in kept}
        dtypes = {n: w.dtype if w.scale == 1 else "float32" for n, w in read.items()}
        tensors, _ = pack_weights(read, dtypes, self.source)
        read = {
            name: replace(weight_of(name, tensors[name]), names=weight.names, folded=weight.scale)
            for name, weight in read.items()
        }
        return replace(self, weights=kept | read)
