"""Adapter in canonical form: A [k, r] and B [r, n] per site, with B's scale kept separately.

A site may have vectors [n] too: a bias, or a whole trained one, of which the base model's own is
taken (`fitting/trained_biases.py`); and a scale, or DoRA's magnitude, of which a scale is made
(`fitting/dora.py`).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.sites import (
    FACTORS,
    MAGNITUDE,
    TRAINED_BIAS,
    VECTORS,
    BindingNames,
    Factor,
    parse_binding,
)
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.short_repr import clipped, short_value
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.token_rows import TokenRows
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
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor -> why it is not applied
    targets: Callable[[str], bool | None] | None = None  # what its config says of a path, if it can
    warnings: tuple[str, ...] = ()  # what its file alone makes suspicious, a line each
    vectors_from: str = ""  # what of its source asks for vectors, for messages
    tokens: Mapping[str, TokenRows] = field(default_factory=dict)  # by path of what has the rows
    task_type: str | None = "CAUSAL_LM"  # by PEFT's name; None: of a part of a diffusion model
    of_others: frozenset[str] = frozenset()  # of `ignored`: tensors of another component
    owned: bool = True  # False: memory of another library, taken in place or not at all

    def __post_init__(self) -> None:
        """Freeze the mappings."""
        for name in ("weights", "unusable_keys", "base_copies", "ignored", "tokens"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __repr__(self) -> str:
        """Return where it is from, and how many tensors it has."""
        return clipped(f"<Adapter {short_value(self.source)}: {len(self.weights)} tensors>")

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Rank of every site, by its path, read from A's shape [k, r], or [E, k, r] of experts."""
        return {
            parsed[1]: weight.shape[-1]
            for name, weight in self.weights.items()
            if (parsed := parse_binding(name)) and parsed[0] == "A" and len(weight.shape) in (2, 3)
        }

    @cached_property
    def vectors(self) -> dict[tuple[Factor, str], Weight]:
        """Every scale, bias and magnitude [n], by what it is and its module's path."""
        parsed = {name: parse_binding(name) for name in self.weights}
        kinds = (*VECTORS, MAGNITUDE, TRAINED_BIAS)
        return {at: self.weights[name] for name, at in parsed.items() if at and at[0] in kinds}

    @checked
    def check_vectors(self, *, are_taken: bool, is_graph: bool = False) -> None:
        """Refuse vectors where nothing takes them; no graph by another exporter does.

        Raises:
            AdapterError: there are some.
        """
        if self.vectors and not are_taken:
            name = next(iter(self.vectors.values())).names[0]
            what = self.vectors_from or f"{self.source}: {name} is a vector beside A and B"
            advice = "" if is_graph else "; or build an engine for it with --lora-vectors"
            raise AdapterError(f"{what}{advice}")

    def check_alone(self) -> None:
        """Refuse vectors and trained tokens where something is made of A and B alone.

        Raises:
            AdapterError: there are some.
        """
        if self.vectors:
            names = ", ".join(next(iter(self.vectors.values())).names)
            raise AdapterError(
                f"{self.source}: {names} is of DoRA or a bias, which are taken as they are: not in "
                "a blend, at another strength, in shards or in TensorRT-LLM's format"
            )
        for path in self.tokens:
            raise AdapterError(
                f"{self.source}: rows of {path} were trained, and which A and B they are depends "
                "on the base model; convert with --engine DIR, or take the adapter from a store"
            )

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
        for path, tokens in sorted(self.tokens.items()):
            digest.update(f"{path}\0{tokens.ids}\0".encode())
            digest.update(tokens.rows.values().tobytes())
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

    @checked
    def pairs(self, *, beside_vectors: bool = False) -> dict[str, Pair]:
        """Return A and B of every site, by its path.

        Args:
            beside_vectors: the caller takes care of `vectors`; otherwise there may be none.

        Raises:
            AdapterError: a name is no binding's, a factor is missing from its pair, or a site has
                vectors, which what is made of pairs would lack.
        """
        found: dict[str, dict[Factor, Weight]] = {}
        for name, weight in self.weights.items():
            if (parsed := parse_binding(name)) is None:
                raise AdapterError(f"{self.source}: {name!r} is not the name of a LoRA binding")
            if parsed[0] in FACTORS:
                found.setdefault(parsed[1], {})[parsed[0]] = weight
        if not beside_vectors:
            self.check_alone()
        for path, both in found.items():
            if missing := [factor for factor in FACTORS if factor not in both]:
                raise AdapterError(f"{self.source}: {path} has no {missing[0]}")
        return {path: (both["A"], both["B"]) for path, both in found.items()}

    @checked
    def named(self, names: BindingNames) -> dict[str, Weight]:
        """Return all weights as an engine takes them, by the names of a spelling.

        Raises:
            AdapterError: a name is no binding's, a factor is missing from its pair, or a site has
                DoRA's magnitude or a trained bias, and not yet what they make with the base model.
        """
        pairs, found = self.pairs(beside_vectors=True), dict[str, Weight]()
        if self.tokens:
            self.check_alone()
        for path, pair in pairs.items():
            found |= zip(names.pair(path), pair, strict=True)
        for (kind, path), weight in self.vectors.items():
            if kind not in VECTORS:
                what = "DoRA's magnitude" if kind == MAGNITUDE else "a whole bias"
                raise AdapterError(
                    f"{self.source}: {weight.names[0]} is {what}, which needs the base model's "
                    "weights; convert with --base DIR too, or with --engine DIR"
                )
            found[names.binding(kind, path)] = weight
        return found

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
        vectors = {id(weight) for weight in self.vectors.values()}
        for weight in self.weights.values():
            if len(weight.shape) not in (2, 3) and id(weight) not in vectors:
                name, shape = ", ".join(weight.names), list(weight.shape)
                raise AdapterError(f"{self.source}: {name} has shape {shape}, expected a matrix")
        for copy in self.base_copies.values():
            copy.sha256  # noqa: B018 - it is kept
        kept = {n: w for n, w in self.weights.items() if w.tensor is not None and w.scale == 1}
        read = {n: w for n, w in self.weights.items() if n not in kept}
        dtypes = {n: w.dtype if w.scale == 1 else "float32" for n, w in read.items()}
        tensors, _ = pack_weights(read, dtypes, self.source)
        tokens = {path: rows.in_memory() for path, rows in self.tokens.items()}
        read = {
            name: replace(weight_of(name, tensors[name]), names=weight.names, folded=weight.scale)
            for name, weight in read.items()
        }
        return replace(self, weights=kept | read, tokens=tokens)
