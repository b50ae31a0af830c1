"""Load a component of a diffusers pipeline, and trace it into a graph; or its outline alone."""

import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trt_lora.builder.export.causal_lm import Exported, export_module
from trt_lora.builder.export.component_calls import COMPONENTS, UNTRACED, component_call
from trt_lora.builder.export.component_step import ComponentStep
from trt_lora.builder.export.torch_modules import lora_modules, untie_linears
from trt_lora.builder.graphs.component_folder import component_class
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.passes.lowering.floor_divisions import FloorDivisions
from trt_lora.builder.passes.lowering.promote_concats import PromoteConcats
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.extras import extra


@dataclass(frozen=True)
class Outline:
    """What a component has, known without its weights."""

    paths: frozenset[str]  # of its linears and convolutions
    kernels: frozenset[str]  # of those convolutions that have more than one tap
    symbols: frozenset[str]  # sizes of its inputs that vary, such as "height"


def outline(folder: Path) -> Outline:
    """Return the outline of the component in a folder; nothing but its config is read.

    Raises:
        ModelError: it cannot be made of its config, or nothing says how it is called.
        BackendError: diffusers is not installed.
    """
    kind = _kind(folder)
    with _one_line(folder, kind), torch.device("meta"):
        is_diffusers = hasattr(kind, "load_config")
        config = (
            kind.load_config(folder) if is_diffusers else kind.config_class.from_pretrained(folder)
        )
        model = kind.from_config(config) if is_diffusers else kind(config)
    convolutions = {p: m for p, m in model.named_modules() if isinstance(m, torch.nn.Conv2d)}
    kernels = frozenset(p for p, m in convolutions.items() if math.prod(m.kernel_size) > 1)
    paths = frozenset(path for path, _ in lora_modules(model)) | convolutions.keys()
    with torch.device("meta"):
        sizes = component_call(model).sizes.values()
    dims = (size for varying in sizes for size in varying.values())
    return Outline(paths, kernels, frozenset(getattr(dim, "root", dim).__name__ for dim in dims))


def trace_component(folder: Path, dtype: str, outputs: Collection[str] = ()) -> Exported:
    """Return the graph of the module in a folder, with its weights in memory.

    Args:
        folder: of the component.
        dtype: of its weights.
        outputs: those that the graph returns; none: all.

    Raises:
        ModelError: it cannot be loaded or traced, or nothing says how it is called.
        BackendError: diffusers is not installed.
    """
    kind, options = _kind(folder), {"torch_dtype": getattr(torch, dtype), "use_safetensors": True}
    with _one_line(folder, kind):
        model = kind.from_pretrained(folder, **options).eval()
    untie_linears(model)
    exported = export_module(model, ComponentStep(model, outputs))
    PromoteConcats()(exported.model)
    FloorDivisions()(exported.model)
    return exported


def _one_line(folder: Path, kind: Any) -> AbstractContextManager[None]:
    what = f"{folder} cannot be loaded as a {kind.__name__}"
    return one_line(what, "download or copy it again")


def _kind(folder: Path) -> Any:
    """The class of the module in a folder."""
    name = component_class(folder)
    if name not in COMPONENTS:
        known = ", ".join(sorted(COMPONENTS))
        why = f": {UNTRACED[name]}" if name in UNTRACED else ""
        raise ModelError(
            f"{folder} has a {name or 'model'}, which is not traced{why}; known: {known}"
        )
    with extra("diffusion", f"building an engine of a {name}"):
        import diffusers
        import transformers
    return getattr(diffusers, name, None) or getattr(transformers, name)
