"""Trained biases as vectors of their modules: what they differ from the base model's own by.

PEFT's `bias: all | lora_only` replaces biases of the base model. An engine adds its own behind what
an adapter changes, so that b = trained - own, beside the bias that `lora_bias` trains.
"""

from collections.abc import Container
from dataclasses import replace

import numpy as np

from trt_lora.plugins.contract.sites import TRAINED_BIAS, BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.dora import Base
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.stored_matrix import bias_of
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array


def with_bias_differences(adapter: Adapter, base: Base, paths: Container[str]) -> Adapter:
    """Return the adapter with a bias in the place of trained ones; it is read when it is cast.

    Args:
        adapter: any; one without trained biases is returned as it is.
        base: the base model's biases [1, n], by `bias_of` their modules' paths.
        paths: of the modules whose biases are meant; others stay.

    Raises:
        AdapterError: (when a bias is read) it is not as wide as the base model's.
    """
    names, weights = BindingNames.LORA, dict(adapter.weights)
    for (kind, path), trained in adapter.vectors.items():
        if kind == TRAINED_BIAS and path in paths:
            del weights[names.binding(TRAINED_BIAS, path)]
            name = names.binding("bias", path)
            weights[name] = _difference(trained, weights.get(name), path, base, adapter.source)
    return replace(adapter, weights=weights)


def _difference(
    trained: Weight, beside: Weight | None, path: str, base: Base, source: str
) -> Weight:
    parts = [trained] if beside is None else [trained, beside]
    labels = tuple(name for part in parts for name in part.names)

    def read(buffer: ReadBuffer | None = None) -> Array:
        total = np.zeros(trained.shape)
        for part in parts:
            total += part.values()
        for _, columns, values in base(bias_of(path)):
            if total[columns].shape != values.shape[1:]:
                found = f"{list(values.shape[1:])} values, {labels[0]} {list(trained.shape)}"
                raise AdapterError(f"{source}: the bias of {path} has {found}")
            total[columns] -= values[0]
        with np.errstate(all="ignore"):  # what is not finite is refused by its name
            return np.asarray(total, np.float32)

    return Weight(labels, trained.shape, "float32", read)
