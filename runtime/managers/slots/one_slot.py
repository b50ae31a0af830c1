"""One adapter for an engine of many: stacks of a single slot, which every row takes.

Nothing is copied: A [k, R] is a stack [1, k, R] where it lies. `lora_slot` has one element, which
the engine repeats for every row, so that nobody needs to know how many rows there are.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_RANK, LORA_SLOT, SLOT_DTYPE
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy


def as_slot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors [...] as stacks [1, ...], in the same memory."""
    return {name: replace(tensor, shape=(1, *tensor.shape)) for name, tensor in tensors.items()}


def base_rows(manifest: Manifest) -> dict[str, Tensor]:
    """Return the inputs beside the stacks for rows that take no adapter."""
    return _rows(BASE_SLOT, [0] * len(manifest.sites))


def rows_of_slot(manifest: Manifest, fitted: Fitted) -> dict[str, Tensor]:
    """Return the inputs beside the stacks for rows that all take an adapter.

    Raises:
        AdapterError: a tensor is narrower than a slot, and may not be copied.
    """
    for name, tensor in fitted.tensors.items():
        site, factor = manifest.lora_bindings[name]
        room = site.shape(factor, manifest.max_lora_rank)
        if tensor.shape != room:
            raise AdapterError(
                f"{fitted.coverage.source}: {name} has shape {list(tensor.shape)}, but a slot of "
                f"this engine is {list(room)}, and weights in memory are taken in place; fill "
                "them up with zeros, or load the adapter from a file"
            )
    return _rows(0, [site.rank for site in fitted.coverage.sites])


def unpadded(
    weights: Mapping[str, Weight], manifest: Manifest, coverage: Coverage
) -> dict[str, Weight]:
    """Return the weights up to the rank of each site: ranks of blends add up."""
    ranks = {site.path: site.rank for site in coverage.sites}
    sites = {name: manifest.lora_bindings[name] for name in weights}
    return {
        name: weights[name].part(1 if factor == "A" else 0, 0, ranks[site.path])
        for name, (site, factor) in sites.items()
    }


def _rows(slot: int, ranks: list[int]) -> dict[str, Tensor]:
    return {
        LORA_SLOT: tensor_from_numpy(np.array([slot], SLOT_DTYPE)),
        LORA_RANK: tensor_from_numpy(np.array([ranks], SLOT_DTYPE)),
    }
