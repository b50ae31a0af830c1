"""Fit an adapter to an engine: every tensor finds its binding, or the adapter is refused by name.

Also the one place that knows how a weight must look: A [k, r] and B [r, n] of one rank from 1 to
the engine's maximum, in the engine's dtype.
"""

from collections.abc import Mapping

import numpy as np

from trt_lora.plugins.contract import MIN_RANK, Factor, Site, parse_binding
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.safetensors_file import check_finite
from trt_lora.runtime.tensors import HOST, Tensor, narrow, tensor_from_storage, widen


def fit_adapter(adapter: Adapter, manifest: Manifest) -> dict[str, Tensor]:
    """Return the adapter's tensors under the engine's binding names and in its dtype.

    Raises:
        AdapterError: a tensor has no binding, a wrong shape or a rank beyond the engine's; a pair
            is incomplete; or a value leaves the range of the engine's dtype.
    """
    named = {_binding_of(name, adapter, manifest): t for name, t in adapter.tensors.items()}
    if len(named) < len(adapter.tensors):
        raise AdapterError(f"{adapter.source}: two of its tensors are for one binding")
    _check_weights(named, manifest, adapter.source)
    return {
        name: _in_dtype(tensor, manifest.lora_bindings[name][0].dtype, adapter, name)
        for name, tensor in named.items()
    }


def _check_weights(weights: Mapping[str, Tensor], manifest: Manifest, source: str) -> None:
    for name, tensor in weights.items():
        site, factor = manifest.lora_bindings[name]
        _check_shape(tensor, site, factor, manifest, f"{source}: {name}")
    for site in manifest.sites:
        _check_pair(weights, site, manifest, source)


def _binding_of(name: str, adapter: Adapter, manifest: Manifest) -> str:
    """The engine's name for a tensor; the other spelling of the contract is read too."""
    if name in manifest.lora_bindings:
        return name
    parsed = parse_binding(name)
    binding = manifest.binding_names.binding(*parsed) if parsed else name
    if binding not in manifest.lora_bindings:
        raise AdapterError(_no_binding(name, adapter.source, manifest))
    return binding


def _no_binding(name: str, source: str, manifest: Manifest) -> str:
    parsed = parse_binding(name)
    what = f"module {parsed[1]}" if parsed else f"tensor {name!r}"
    modules = sorted({site.path.rsplit(".", 1)[-1] for site in manifest.sites})
    return (
        f"{source}: {what} has no site in this engine, which takes LoRA on "
        f"{', '.join(modules)} of {manifest.base_model.name} ({len(manifest.sites)} sites). "
        "Check that the adapter is for this base model, or build an engine with "
        f"--lora-dir {source}"
    )


def _check_shape(tensor: Tensor, site: Site, factor: Factor, manifest: Manifest, what: str) -> None:
    if len(tensor.shape) != 2:
        raise AdapterError(f"{what} has shape {list(tensor.shape)}, expected a matrix")
    rank = tensor.shape[1 if factor == "A" else 0]
    if tensor.shape != site.shape(factor, rank):
        expected = "[k, r]" if factor == "A" else "[r, n]"
        raise AdapterError(
            f"{what} has shape {list(tensor.shape)}, expected {expected} with k={site.k} and "
            f"n={site.n}: the adapter was trained on another base model than "
            f"{manifest.base_model.name}, or its factors are transposed"
        )
    if not MIN_RANK <= rank <= manifest.max_lora_rank:
        raise AdapterError(
            f"{what} has rank {rank}; this engine takes {MIN_RANK} to {manifest.max_lora_rank}"
            + (f". Build it with --max-lora-rank {rank} or more" if rank else "")
        )


def _check_pair(weights: Mapping[str, Tensor], site: Site, manifest: Manifest, source: str) -> None:
    names = [manifest.binding_names.binding(factor, site.path) for factor in ("A", "B")]
    a, b = (weights.get(name) for name in names)
    if a is None and b is None:
        return
    if a is None or b is None:
        raise AdapterError(f"{source}: {names[0 if a is None else 1]} is missing from its pair")
    if a.shape[1] != b.shape[0]:
        raise AdapterError(
            f"{source}: {names[0]} has rank {a.shape[1]} but {names[1]} has rank {b.shape[0]}"
        )


def _in_dtype(tensor: Tensor, dtype: str, adapter: Adapter, name: str) -> Tensor:
    what = f"{adapter.source}: {name}"
    if not adapter.owned and tensor.device == HOST:  # what a file holds was checked when read
        check_finite(tensor.storage(), tensor.dtype, what)
    if tensor.dtype == dtype:
        return tensor
    if not adapter.owned:
        raise AdapterError(
            f"{what} is {tensor.dtype}, this engine takes {dtype}; convert the weights first, "
            "for they are taken in place and never copied"
        )
    return _cast(tensor, dtype, what)


def _cast(tensor: Tensor, dtype: str, what: str) -> Tensor:
    values = widen(tensor.storage(), tensor.dtype).astype(np.float32, copy=False)
    storage = narrow(values, dtype)
    if not np.isfinite(widen(storage, dtype)).all():
        raise AdapterError(
            f"{what} has a value of {np.abs(values).max():.4g}, beyond the range of the engine's "
            f"{dtype}; build the engine with --dtype bfloat16 or float32"
        )
    return tensor_from_storage(storage, dtype)
