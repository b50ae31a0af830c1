"""Fit an adapter to an engine: match bindings, check shapes, pad ranks and cast.

Every tensor finds its binding, or the adapter is refused by name. Weights are A [k, r] and B [r, n]
of one rank from 1 to the engine's maximum, and vectors [n] beside them; those of experts have a
first axis more, the expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.contract.modules import is_embedding
from trt_lora.plugins.contract.sites import (
    FACTORS,
    MIN_RANK,
    TRAINED_BIAS,
    VECTORS,
    Factor,
    Site,
    parse_binding,
)
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.fitting.base_check import (
    check_fingerprint,
    compare_copies,
    scaled_base,
)
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.engine_base import fit_to_base
from trt_lora.runtime.adapters.fitting.fused_modules import map_pairs
from trt_lora.runtime.adapters.fitting.load_report import coverage_of
from trt_lora.runtime.adapters.fitting.no_effect import without_effect
from trt_lora.runtime.adapters.fitting.stacked_experts import stack_experts, together
from trt_lora.runtime.adapters.formats.diffusion.spellings import without_or_with_text_model
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Pair, Weight, padded, zeros
from trt_lora.runtime.manifest import GRAPH, Manifest
from trt_lora.runtime.memory.dtypes import is_finite
from trt_lora.runtime.memory.tensor import HOST, Tensor

_EXPERTS = "experts take LoRA in an engine built with --lora-target-modules moe_gate_up moe_4h_to_h"

_EMBEDDING = "an embedding takes LoRA in an engine built with --lora-target-modules embed_tokens"


@dataclass(frozen=True)
class Fitted:
    """An adapter's tensors under the engine's binding names and in its dtypes."""

    tensors: Mapping[str, Tensor]
    coverage: Coverage


def fit_adapter(
    adapter: Adapter,
    manifest: Manifest,
    *,
    strict: bool = True,
    rank_multiple: int = 1,
    directory: Path | None = None,
) -> Fitted:
    """Fit an adapter to an engine.

    Everything but the values is checked before the first value of a factor is read.

    Args:
        adapter: what a file or a caller gave.
        manifest: of the engine.
        strict: False turns a tensor without a binding into an entry of the coverage.
        rank_multiple: what the executor wants ranks padded to, with zeros.
        directory: of the engine, whose weights DoRA and trained biases need.

    Raises:
        AdapterError: the adapter is for another base model; a tensor has no binding (in strict
            mode), a wrong shape or a rank beyond the engine's; or a value is not finite or leaves
            the range of the engine's dtype.
    """
    adapter = adapter_of_engine(adapter, manifest, directory)
    weights, unexpected_keys = _match(adapter, manifest, strict=strict)
    padded_weights = _with_padded_ranks(adapter, weights, manifest, rank_multiple)
    tensors, conversions = _bind_or_cast(adapter, padded_weights, manifest)
    coverage = coverage_of(adapter, manifest, weights, unexpected_keys, tensors, conversions)
    return Fitted(tensors, coverage)


def preview_adapter(
    adapter: Adapter, manifest: Manifest, *, strict: bool = True, rank_multiple: int = 1
) -> Coverage:
    """Return the coverage of `fit_adapter` without what casts do: no value of a factor is read.

    Raises:
        AdapterError: as `match_adapter`.
    """
    adapter = adapter_of_engine(adapter, manifest, None)
    weights, unexpected_keys = _match(adapter, manifest, strict=strict)
    held = _with_padded_ranks(adapter, weights, manifest, rank_multiple)
    dtypes = {name: manifest.lora_bindings[name][0].dtype for name in weights}
    tensors = {name: Tensor(0, weight.shape, dtypes[name]) for name, weight in held.items()}
    return coverage_of(adapter, manifest, weights, unexpected_keys, tensors, {})


def match_adapter(
    adapter: Adapter, manifest: Manifest, *, strict: bool = True, directory: Path | None = None
) -> tuple[dict[str, Weight], dict[str, str]]:
    """Do all of `fit_adapter` that needs no values but those of copied base weights.

    What DoRA and trained biases need is computed when it is read, which takes the engine's
    directory.

    Returns:
        The weights under the engine's binding names; and tensor -> why it has no binding.

    Raises:
        AdapterError: as `fit_adapter`.
    """
    return _match(adapter_of_engine(adapter, manifest, directory), manifest, strict=strict)


def adapter_of_engine(adapter: Adapter, manifest: Manifest, directory: Path | None) -> Adapter:
    """Return the adapter with what the engine's weights make of it, read when it is cast.

    Args:
        adapter: what a file or a caller gave.
        manifest: of the engine.
        directory: of the engine; None where no values will be read.

    Raises:
        AdapterError: it was converted for another base model; or as `check_vectors` and
            `fit_to_base`.
    """
    check_fingerprint(adapter, manifest)
    adapter.check_vectors(are_taken=manifest.lora_vectors, is_graph=manifest.kind == GRAPH)
    return fit_to_base(adapter, manifest, directory)


def _match(
    adapter: Adapter, manifest: Manifest, *, strict: bool
) -> tuple[dict[str, Weight], dict[str, str]]:
    if strict and (reason := scaled_base(adapter, manifest)):
        raise AdapterError(f"{adapter.source}: {reason}; strict=False takes it as it is")
    weights, unexpected_keys = _bindings_of(adapter, manifest)
    for name, weight in weights.items():
        site, factor = manifest.lora_bindings[name]
        label = f"{adapter.source}: {', '.join(weight.names)}"
        _check_shape(weight, site, factor, manifest, label)
    for site in manifest.sites:
        names = manifest.binding_names.pair(site.path)
        a, b = map(weights.get, names)
        if a and b and a.shape[-1] != b.shape[-2]:
            raise AdapterError(
                f"{adapter.source}: {names[0]} has rank {a.shape[-1]} but {names[1]} has rank "
                f"{b.shape[-2]}"
            )
    if strict and unexpected_keys:
        raise AdapterError(_refusal(adapter, manifest, unexpected_keys))
    if strict and not weights:
        why = next(iter(adapter.warnings), "save the adapter again")
        raise AdapterError(f"{adapter.source} holds no tensors for this engine; {why}")
    return weights, unexpected_keys


def _bindings_of(adapter: Adapter, manifest: Manifest) -> tuple[dict[str, Weight], dict[str, str]]:
    """Find the binding of every weight.

    Returns:
        The weights under the engine's names, in pairs; and tensor -> why it has no binding.

    Raises:
        AdapterError: two tensors are for one binding.
    """
    found: list[tuple[str, Weight]] = []
    elsewhere: dict[str, dict[Factor, Weight]] = {}
    same, other = compare_copies(adapter, manifest.base_model.embeddings)
    unexpected_keys = {n: why for n, why in adapter.unusable_keys.items() if n not in same} | other
    idle = without_effect(adapter, manifest)
    for name, weight in adapter.weights.items():
        if name in idle:
            continue
        parsed = parse_binding(name)
        if parsed is not None and parsed[0] == TRAINED_BIAS:  # of no site: one of the copies
            continue
        if binding := _binding_of(name, manifest):
            found.append((binding, weight))
        elif parsed is None:
            unexpected_keys |= dict.fromkeys(weight.names, f"{name!r} is no binding of this engine")
        else:
            elsewhere.setdefault(parsed[1], {})[parsed[0]] = weight
    mapped, reasons = _match_factors(elsewhere, manifest)
    found += mapped
    if len(dict(found)) < len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise AdapterError(
            f"{adapter.source}: two of its tensors are for one binding, {twice}: "
            f"{listed([n for name, weight in found if name == twice for n in weight.names])}"
        )
    weights = dict(found)
    return weights, unexpected_keys | reasons | _drop_single_factors(weights, manifest)


def _binding_of(name: str, manifest: Manifest) -> str:
    """The engine's own name of a binding; empty if it has none."""
    names = [name]
    if parsed := parse_binding(name):
        factor, path = parsed
        paths = (path, *without_or_with_text_model(path))
        names += [manifest.binding_names.binding(factor, path) for path in paths]
    return next((name for name in names if name in manifest.lora_bindings), "")


def _match_factors(
    factors: Mapping[str, Mapping[Factor, Weight]], manifest: Manifest
) -> tuple[list[tuple[str, Weight]], dict[str, str]]:
    """Map what has no site of its own onto fused or split modules; vectors stay where they are."""
    matrices: dict[str, Pair] = {
        path: (both["A"], both["B"])
        for path, both in factors.items()
        if both.keys() == {*FACTORS} and len({len(w.shape) for w in both.values()} - {2, 3}) == 0
    }
    matrices, why = stack_experts(matrices, manifest.sites)
    paths = {site.path for site in manifest.sites}
    mapped, more = map_pairs({p: m for p, m in matrices.items() if p not in paths}, manifest.sites)
    mapped += [(path, pair) for path, pair in matrices.items() if path in paths]
    why |= {path: f"its {left} is missing" for path, left in _incomplete(factors)} | more
    why |= {
        path: "vectors are not split or joined as A and B are"
        for path, both in factors.items()
        if both.keys() - {*FACTORS}
    }
    names = manifest.binding_names
    found = [item for path, pair in mapped for item in zip(names.pair(path), pair, strict=True)]
    reached = {name for _, weight in found for name in weight.names}
    reasons = {
        name: f"module {path} has no site in this engine{_because(path, why)}"
        for path, both in factors.items()
        for weight in both.values()
        for name in weight.names
        if name not in reached
    }
    return found, reasons


def _incomplete(factors: Mapping[str, Mapping[Factor, Weight]]) -> Iterator[tuple[str, str]]:
    for path, both in factors.items():
        yield from ((path, factor) for factor in FACTORS if factor not in both)


def _because(path: str, why: Mapping[str, str]) -> str:
    if reason := why.get(path) or why.get(together(path)):
        return f": {reason}"
    if is_embedding(path):
        return f": {_EMBEDDING}"
    return f": {_EXPERTS}" if _is_expert(path) else ""


def _is_expert(path: str) -> bool:
    return "experts" in path.split(".")


def _drop_single_factors(weights: dict[str, Weight], manifest: Manifest) -> dict[str, str]:
    """Take out every A without its B and the other way round; return why.

    A bias by itself is beside zeros.
    """
    dropped: dict[str, str] = {}
    for site in manifest.sites:
        a, b = manifest.binding_names.pair(site.path)
        if (a in weights) != (b in weights):
            present, missing = (a, b) if a in weights else (b, a)
            weight = weights.pop(present)
            dropped |= dict.fromkeys(weight.names, f"{missing} is missing from its pair")
        elif a not in weights and manifest.binding_names.binding("bias", site.path) in weights:
            factors = (zeros(site.shape(factor, MIN_RANK), site.dtype) for factor in FACTORS)
            weights |= zip((a, b), factors, strict=True)
        if a not in weights or b not in weights:
            for name in _vectors_of(site, manifest) & weights.keys():
                dropped |= dict.fromkeys(weights.pop(name).names, "there is no A and B beside it")
    return dropped


def _vectors_of(site: Site, manifest: Manifest) -> set[str]:
    return {manifest.binding_names.binding(factor, site.path) for factor in VECTORS}


def _refusal(adapter: Adapter, manifest: Manifest, unexpected_keys: Mapping[str, str]) -> str:
    """Return the message that refuses an adapter for its unbound tensors."""
    modules = sorted({site.path.rsplit(".", 1)[-1] for site in manifest.sites})
    build = f", or build an engine with --lora-dir {adapter.source}" if adapter.owned else ""
    return (
        f"{adapter.source}: {len(unexpected_keys)} of its tensors have no binding: "
        f"{listed([f'{name} ({why})' for name, why in unexpected_keys.items()])}. "
        f"This engine takes LoRA on {', '.join(modules)} of {manifest.base_model.name} "
        f"({len(manifest.sites)} sites). Check that the adapter is for this base model{build}; "
        "strict=False leaves such tensors out"
    )


def _check_shape(
    weight: Weight, site: Site, factor: Factor, manifest: Manifest, label: str
) -> None:
    shape = [*weight.shape]
    if factor in VECTORS:
        if weight.shape != site.shape(factor, 0):
            raise AdapterError(f"{label} has shape {shape}, expected [n] with n={site.n}")
        return
    if len(shape) != 2 + bool(site.experts):
        what = f"the matrices of {site.experts} experts" if site.experts else "a matrix"
        raise AdapterError(f"{label} has shape {shape}, expected {what}")
    if site.experts and shape[0] != site.experts:
        raise AdapterError(
            f"{label} is of {shape[0]} experts, {site.path} has {site.experts}: the adapter was "
            f"trained on another base model than {manifest.base_model.name}"
        )
    rank = weight.shape[-1 if factor == "A" else -2]
    if weight.shape != site.shape(factor, rank):
        found = f"is in the file {[*weight.in_file]}" if weight.in_file else f"has shape {shape}"
        axes = ("E",) * bool(site.experts) + (("k", "r") if factor == "A" else ("r", "n"))
        expected = ", ".join(reversed(axes) if weight.in_file else axes)
        raise AdapterError(
            f"{label} {found}, expected [{expected}] with k={site.k} and n={site.n}: the adapter "
            f"was trained on another base model than {manifest.base_model.name}, or its factors "
            "are transposed"
        )
    if not MIN_RANK <= rank <= manifest.most_rank(site):
        advice = f". Build it with --max-lora-rank {rank} or more" if rank else ""
        if site.path in manifest.saved_modules:
            advice = ": of a blend, one part alone may have saved it whole"
        raise AdapterError(
            f"{label} has rank {rank}; this engine takes {MIN_RANK} to {manifest.most_rank(site)}"
            f"{advice}"
        )


def _with_padded_ranks(
    adapter: Adapter, weights: Mapping[str, Weight], manifest: Manifest, multiple: int
) -> dict[str, Weight]:
    """Pad ranks as the executor's kernels like them; what is taken in place stays as it is."""
    taken = dict(weights)
    for site in manifest.sites:
        names = manifest.binding_names.pair(site.path)
        pair = [weights[name] for name in names if name in weights]
        if pair and all(_is_read(weight, adapter) for weight in pair):
            rank = -(-pair[0].shape[-1] // multiple) * multiple
            rank = min(rank, manifest.most_rank(site))
            for name, factor in zip(names, FACTORS, strict=True):
                taken[name] = padded(weights[name], site.shape(factor, rank))
    return taken


def _is_read(weight: Weight, adapter: Adapter) -> bool:
    return weight.tensor is None or (adapter.owned and weight.tensor.device == HOST)


def _bind_or_cast(
    adapter: Adapter, weights: Mapping[str, Weight], manifest: Manifest
) -> tuple[dict[str, Tensor], dict[str, Conversion]]:
    """Bind what is in memory already; cast the rest.

    An adapter that was read into one buffer is bound in place as a whole or not at all: a part
    would keep all of the buffer.
    """
    dtypes = {name: manifest.lora_bindings[name][0].dtype for name in weights}
    in_place: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.tensor is not None:
            _check_borrowed(adapter, name, weight.tensor, dtypes[name])
            if weight.dtype == dtypes[name]:
                in_place[name] = weight.tensor
    if adapter.owned and len(in_place) < len(adapter.weights):
        in_place = {}
    rest = {name: weight for name, weight in weights.items() if name not in in_place}
    packed, conversions = pack_weights(rest, dtypes, adapter.source)
    return {name: in_place.get(name) or packed[name] for name in weights}, conversions


def _check_borrowed(adapter: Adapter, name: str, tensor: Tensor, dtype: str) -> None:
    """Check borrowed memory; an owned adapter was checked when it was read."""
    if adapter.owned:
        return
    label = f"{adapter.source}: {name}"
    if tensor.device == HOST and not is_finite(tensor.storage()):
        raise AdapterError(f"{label} holds NaN or infinity")
    if tensor.dtype != dtype:
        raise AdapterError(
            f"{label} is {tensor.dtype}, this engine takes {dtype}; convert the weights first, "
            "for they are taken in place and never copied"
        )
