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
from trt_lora.builder.checks.meta_model import head_path, usable_positions
from trt_lora.builder.export.torch_modules import module_linears
from trt_lora.builder.passes.coded_weight import CodedWeight
from trt_lora.builder.passes.lowering.sign_codes import has_signed_form
from trt_lora.builder.progress import Progress
from trt_lora.builder.quantising.quantise import QuantisedLinear, Quantiser
from trt_lora.builder.resolved import ResolvedBuild


@dataclass(frozen=True)
class LoadedBase:
    """A base model, and which of its linears are to be read as codes."""

    model: Any  # a `PreTrainedModel` in the engine's dtype; linears in codes have their values
    codes: Mapping[str, QuantisedLinear]  # by the module's path


def load_base(build: ResolvedBuild, progress: Progress) -> LoadedBase:
    """Return the base model of a build.

    Raises:
        ModelError: it cannot be loaded, or be run on the text that codes are found by.
        ConfigError: that text cannot be read.
    """
    progress.stage("load")
    config, checkpoint = build.config, build.model.checkpoint
    if stored := stored_linears(checkpoint):
        return _stored(build, stored, progress)
    if config.quantize == "none":
        return LoadedBase(load_model(checkpoint, config.dtype), {})
    model = load_model(checkpoint, "float32")  # codes are of the checkpoint's own values
    head, positions = head_path(model), usable_positions(model)
    codes = Quantiser(model, config, build.has_plan, head, positions, progress).quantised()
    model.to(getattr(torch, config.dtype))
    check_finite(checkpoint.directory, model)
    return LoadedBase(model, codes)


def _stored(build: ResolvedBuild, stored: StoredLinears, progress: Progress) -> LoadedBase:
    """A checkpoint in codes, which stay as they are where all that is made multiplies by them."""
    weights, method = dict(stored.weights()), stored.quantisation.method
    model, dtype = load_model(stored.checkpoint, build.config.dtype, weights), build.config.dtype
    kept = {} if dtype == "bfloat16" else dict(_codes(model, weights, method))
    odd = [path for path, linear in kept.items() if not has_signed_form(linear.weight)]
    if build.has_plan and odd:
        kept = {path: linear for path, linear in kept.items() if path not in odd}
        progress.note(
            f"a plan takes no zeros and of 8 bits one scale a row, which {len(odd)} linears in "
            "codes have otherwise: with --flavour none they stay codes"
        )
    if grown := [path for path in weights if path not in kept]:
        floats = sum(math.prod(weights[path].shape) for path in grown)
        size = floats * getattr(torch, dtype).itemsize
        progress.note(
            f"{len(grown)} linears in codes of {method} become {dtype}, {size / 1e6:.1f} MB "
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
