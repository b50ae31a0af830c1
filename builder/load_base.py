"""Load a base model for the export, and find or read the codes of its linears."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.formats.stored_linear import Weight
from trt_lora.builder.checkpoint.stand_ins import StandIns
from trt_lora.builder.checkpoint.stored_linears import StoredLinears, stored_linears
from trt_lora.builder.checks.meta_model import (
    embedding_path,
    head_path,
    meta_model,
    usable_positions,
)
from trt_lora.builder.config import FLOAT8_SINCE, NVFP4_SINCE
from trt_lora.builder.passes.codes.coded_weight import CodedWeight
from trt_lora.builder.passes.lowering.sign_codes import has_signed_form
from trt_lora.builder.progress import Progress
from trt_lora.builder.quantising.quantise import QuantisedLinear, Quantiser
from trt_lora.builder.quantising.streamed_weights import StreamedWeights, streamable
from trt_lora.builder.resolved import ResolvedBuild
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.memory.dtypes import Array


@dataclass(frozen=True)
class LoadedBase:
    """A base model, and which of its linears are to be read as codes."""

    model: Any  # a `PreTrainedModel` in the engine's dtype
    codes: Mapping[str, QuantisedLinear]  # by the module's path
    stand_ins: StandIns | None = None  # what it has for weights of codes; None: their values
    notes: tuple[str, ...] = ()  # what became of codes


def load_base(build: ResolvedBuild, progress: Progress, floats: Collection[str] = ()) -> LoadedBase:
    """Return the base model of a build.

    Args:
        build: with nothing left to decide.
        progress: told the stages.
        floats: names of linears in a checkpoint in codes that are to have their values.

    Raises:
        ModelError: it cannot be loaded, or be run on the text that codes are found by.
        ConfigError: that text cannot be read.
    """
    progress.stage("load")
    config, checkpoint = build.config, build.model.checkpoint
    if stored := stored_linears(checkpoint):
        return _stored(build, stored, floats)
    if config.quantize == "none":
        return LoadedBase(load_model(checkpoint, config.dtype), {})
    return _quantised(build, progress, floats)


def _quantised(build: ResolvedBuild, progress: Progress, floats: Collection[str]) -> LoadedBase:
    """A checkpoint in floats, with codes of its own values, read one linear at a time."""
    dtype, weights = build.config.dtype, _streamed_weights(build, floats)
    head, positions = head_path(weights.model), usable_positions(weights.model)
    quantiser = Quantiser(weights, build.config, build.has_plan, head, positions, progress)
    codes = {
        path: replace(linear, weight=_in_engine(build, linear.weight, path))
        for path, linear in quantiser.quantised().items()
    }
    shapes = dict(weights.shapes())
    streamed = {name: shapes[path] for path, name in weights.names.items()}
    stand_ins = StandIns(streamed, getattr(torch, dtype))
    del weights, quantiser  # of a large vocabulary, embeddings in float32 are gigabytes
    model = load_model(build.model.checkpoint, dtype, stand_ins.weights)
    notes = _slow_note((linear.weight for linear in codes.values()), "--quantize int8")
    return LoadedBase(model, codes, stand_ins, (*notes,))


def _streamed_weights(build: ResolvedBuild, floats: Collection[str]) -> StreamedWeights:
    """The weights of a checkpoint in floats, in a model that has stand-ins for most."""
    checkpoint = build.model.checkpoint
    stand_ins = StandIns(_streamed(build, floats), torch.float32)
    model = load_model(checkpoint, "float32", stand_ins.weights)
    paths = stand_ins.paths(model)
    if others := stand_ins.shapes.keys() - paths.keys():
        return _streamed_weights(build, {*floats, *others})
    weights = StreamedWeights(model, checkpoint, {path: name for name, path in paths.items()})
    weights.check()
    return weights


def _streamed(build: ResolvedBuild, floats: Collection[str]) -> dict[str, tuple[int, int]]:
    """[n, k] of the linears that all become codes and need no floats, by the checkpoint's paths."""
    config = build.config
    model = meta_model(build.model.config, config.dtype)
    kept = {*floats} | ({head_path(model)} if config.quantize_head == "none" else set())
    found = streamable(build.model.checkpoint, model)
    return {
        name: (n, k)
        for name, (n, k) in found.items()
        if name not in kept and k % config.quantize_block == 0
    }


def _stored(build: ResolvedBuild, stored: StoredLinears, floats: Collection[str]) -> LoadedBase:
    """A checkpoint in codes, which stay as they are where all that is made multiplies by them."""
    weights, dtype = dict(stored.weights()), build.config.dtype
    kept, odd = _kept(build, {name: w for name, w in weights.items() if name not in floats})
    stand_ins = StandIns(
        {name: weight.shape for name, weight in kept.items()}, getattr(torch, dtype)
    )
    model = load_model(stored.checkpoint, dtype, {**weights, **stand_ins.weights})
    paths = stand_ins.paths(model, embedding_path(model))
    if others := kept.keys() - paths.keys():
        return _stored(build, stored, {*floats, *others})
    source = f"the checkpoint ({stored.quantisation.method})"
    scales_x = stored.quantisation.scales_x
    codes = {
        path: QuantisedLinear(_in_engine(build, kept[name], path), source, scales_x)
        for name, path in paths.items()
    }
    return LoadedBase(model, codes, stand_ins, (*_notes(build, stored, weights, kept, odd),))


def _kept(
    build: ResolvedBuild, weights: Mapping[str, Weight]
) -> tuple[dict[str, CodedWeight], Collection[str]]:
    """The weights that stay codes, and the names of those that a plan alone does not take."""
    coded = {name: weight for name, weight in weights.items() if isinstance(weight, CodedWeight)}
    if build.config.dtype == "bfloat16":
        return {}, ()
    odd = [name for name, w in coded.items() if build.has_plan and not has_signed_form(w)]
    return {
        name: weight
        for name, weight in coded.items()
        if name not in odd and not (weight.is_float and _float_codes_fault(build, weight))
    }, odd


def _float_codes_fault(build: ResolvedBuild, weight: CodedWeight) -> str:
    """Why a build does not multiply by codes that are floats; empty: it does."""
    if not build.has_plan:
        return "a CPU multiplies by no codes that are floats"
    name, since = _float_name(weight), FLOAT8_SINCE if weight.parts is None else NVFP4_SINCE
    without = [each for each in build.config.compute_capability if float(each) < since]
    if without:
        return f"{name} is read by GPUs of {since} and later, not {', '.join(without)}"
    if weight.parts is not None and _x_scale(build, weight) is None:
        return "a plan that leaves x as it is would make floats of NVFP4 at every step"
    return ""


def _notes(
    build: ResolvedBuild,
    stored: StoredLinears,
    weights: Mapping[str, Weight],
    kept: Mapping[str, CodedWeight],
    odd: Collection[str],
) -> Iterator[str]:
    """Which codes become floats, why, and how many bytes they are then."""
    if odd:
        yield (
            "a plan takes no zeros, no scales below 0, and of 8 bits one scale a row, which "
            f"{len(odd)} linears in codes have otherwise: with --flavour none they stay codes, and "
            "--quantize int4 makes others of the float model"
        )
    floats = [w for w in weights.values() if isinstance(w, CodedWeight) and w.is_float]
    if build.has_plan:
        yield from dict.fromkeys(filter(None, (_float_codes_fault(build, w) for w in floats)))
    if any(weight.parts for weight in kept.values()):
        yield f"the plan reads weights and x as NVFP4: it runs on GPUs of {NVFP4_SINCE} and later"
    yield from _slow_note(kept.values(), "--flavour none")
    if grown := weights.keys() - kept:
        dtype = build.config.dtype
        size = (
            sum(math.prod(weights[name].shape) for name in grown) * getattr(torch, dtype).itemsize
        )
        yield (
            f"{len(grown)} linears in codes of {stored.quantisation.method} become {dtype}, "
            f"{size / 1e6:.1f} MB instead of {sum(map(stored.nbytes, grown)) / 1e6:.1f}"
        )


def _slow_note(weights: Iterable[CodedWeight], cure: str) -> Iterator[str]:
    names = [_float_name(weight) for weight in weights if weight.is_float]
    if names:
        yield (
            f"a CPU makes floats of {len(names)} linears in {names[0]} at every token, which is "
            f"slow; for one, build with {cure}"
        )


def _float_name(weight: CodedWeight) -> str:
    return "FP8" if weight.parts is None else "NVFP4"


def _in_engine(build: ResolvedBuild, weight: CodedWeight, path: str) -> CodedWeight:
    """Give a weight scales in the engine's dtype, and products with x as it is where that is asked.

    Raises:
        ModelError: weights would be infinite.
    """
    dtype, factors = build.config.dtype, weight.factors
    scales, own = torch.from_numpy(weight.scales), getattr(torch, dtype)
    largest = weight.largest * (1 if factors is None else float(abs(factors).max()))
    if not (scales * largest).to(own).isfinite().all():
        raise ModelError(
            f"{path} has scales up to {scales.max():g}, whose weights are infinite in "
            f"{dtype}: the model is damaged, or needs --dtype float32"
        )
    factors = None if factors is None else torch.from_numpy(factors).to(own).numpy()
    x_scale = _x_scale(build, weight)
    return replace(weight, scales=scales.to(own).numpy(), factors=factors, x_scale=x_scale)


def _x_scale(build: ResolvedBuild, weight: CodedWeight) -> Array | None:
    """The scale of x in the engine's dtype; None: products read x as it is."""
    is_exact = not build.has_plan or build.config.quantize_level == "exact"
    if weight.x_scale is None or is_exact:
        return None
    scale = torch.from_numpy(weight.x_scale).to(getattr(torch, build.config.dtype))
    return scale.numpy() if 0 < scale < math.inf else None
