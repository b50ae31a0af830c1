"""Load a base model for the export, and find or read the codes of its linears."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.formats.stored_linear import Weight
from trt_lora.builder.checkpoint.loaded_weights import check_finite, own_names
from trt_lora.builder.checkpoint.stored_linears import StoredLinears, stored_linears
from trt_lora.builder.checks.check_model import CheckedModel
from trt_lora.builder.checks.meta_model import head_path, usable_positions
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.export.torch_modules import module_linears
from trt_lora.builder.passes.coded_weight import CodedWeight
from trt_lora.builder.progress import Progress
from trt_lora.builder.quantising.quantise import QuantisedLinear, Quantiser


@dataclass(frozen=True)
class LoadedBase:
    """A base model, and which of its linears are to be read as codes."""

    model: Any  # a `PreTrainedModel` in the engine's dtype; linears in codes have their values
    codes: Mapping[str, QuantisedLinear]  # by the module's path


def load_base(config: BuildConfig, checked: CheckedModel, progress: Progress) -> LoadedBase:
    """Return the base model of a build.

    Raises:
        ModelError: it cannot be loaded, or be run on the text that codes are found by.
        ConfigError: that text cannot be read.
    """
    progress.stage("load")
    if stored := stored_linears(checked.checkpoint):
        return _stored(config, stored, progress)
    if config.quantize == "none":
        return LoadedBase(load_model(checked.checkpoint, config.dtype), {})
    model = load_model(checked.checkpoint, "float32")  # codes are of the checkpoint's own values
    quantiser = Quantiser(model, config, head_path(model), usable_positions(model), progress)
    codes = quantiser.quantised()
    model.to(getattr(torch, config.dtype))
    check_finite(checked.checkpoint.directory, model)
    return LoadedBase(model, codes)


def _stored(config: BuildConfig, stored: StoredLinears, progress: Progress) -> LoadedBase:
    """A checkpoint in codes, which stay as they are where ONNX Runtime can multiply by them."""
    weights, method = dict(stored.weights()), stored.quantisation.method
    model = load_model(stored.checkpoint, config.dtype, weights)
    kept = dict(_codes(model, weights, method)) if config.keeps_codes else {}
    if grown := [path for path in weights if path not in kept]:
        floats = sum(math.prod(weights[path].shape) for path in grown)
        size = floats * getattr(torch, config.dtype).itemsize
        progress.note(
            f"{len(grown)} linears in codes of {method} become {config.dtype}, {size / 1e6:.1f} MB "
            f"instead of {sum(map(stored.nbytes, grown)) / 1e6:.1f}"
        )
    return LoadedBase(model, kept)


def _codes(
    model: Any, weights: Mapping[str, Weight], method: str
) -> Iterator[tuple[str, QuantisedLinear]]:
    """The codes of a checkpoint, with scales in the model's dtype, by the paths of its modules."""
    modules = dict(module_linears(model))
    source = f"the checkpoint ({method})"
    for name, weight in weights.items():
        path = next((own for own in own_names(name, model) if own in modules), None)
        if isinstance(weight, CodedWeight) and path and modules[path].weight.shape == weight.shape:
            scales = torch.from_numpy(weight.scales).to(model.dtype).numpy()
            yield path, QuantisedLinear(replace(weight, scales=scales), source)
