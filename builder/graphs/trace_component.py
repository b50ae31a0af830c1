"""Load a component of a diffusers pipeline, and trace it into a graph."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from trt_lora.builder.export.causal_lm import export_module
from trt_lora.builder.export.component_calls import COMPONENTS
from trt_lora.builder.export.component_step import ComponentStep
from trt_lora.builder.export.torch_modules import untie_linears
from trt_lora.builder.graphs.component_folder import component_class
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.passes.lowering.promote_concats import PromoteConcats
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.extras import extra


def trace_component(folder: Path, dtype: str) -> ir.Model:
    """Return the graph of the module in a folder, with its weights in memory.

    Raises:
        ModelError: it cannot be loaded or traced, or nothing says how it is called.
        BackendError: diffusers is not installed.
    """
    model = _loaded(folder, dtype)
    untie_linears(model)
    graph = export_module(model, ComponentStep(model)).model
    PromoteConcats()(graph)
    return graph


def _loaded(folder: Path, dtype: str) -> Any:
    name = component_class(folder)
    if name not in COMPONENTS:
        known = ", ".join(sorted(COMPONENTS))
        raise ModelError(f"{folder} has a {name or 'model'}, which is not traced; known: {known}")
    with extra("diffusion", f"building an engine of a {name}"):
        import diffusers
        import transformers
    kind: Any = getattr(diffusers, name, None) or getattr(transformers, name)
    options = {"torch_dtype": getattr(torch, dtype), "use_safetensors": True}
    with one_line(f"{folder} cannot be loaded as a {name}", "download or copy it again"):
        return kind.from_pretrained(folder, **options).eval()
