"""Weights of a base model's linears, for norms of DoRA and biases: of a checkpoint or an engine."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from transformers.pytorch_utils import Conv1D

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.stored_linears import dense, stored_linears
from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.merge_lora import matrix_of
from trt_lora.builder.passes.site_calls import site_calls
from trt_lora.builder.stored_matrices import base_bias
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.stored_matrix import Block, bias_of
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE
from trt_lora.runtime.memory.dtypes import Array

_EVERY = slice(None)


def base_blocks(directory: Path) -> Callable[[str], Iterator[Block]]:
    """Return what yields W [k, n] of a linear, by its path; codes as the values that they are.

    By `bias_of` a path it is the linear's bias [1, n].

    Args:
        directory: of a transformers model, or of an engine, whose sites alone are known.

    Raises:
        ModelError: it is no model, or is damaged.
        AdapterError: (of what is returned) the model has no such linear.
    """
    is_engine = (directory / MANIFEST_FILE).is_file()
    weight = (_of_engine if is_engine else _of_checkpoint)(directory)

    def blocks(path: str) -> Iterator[Block]:
        values = weight(path)
        if values is None:
            raise AdapterError(f"{directory} has no linear {path}: it is not the adapter's base")
        yield _EVERY, _EVERY, values

    return blocks


def _of_engine(directory: Path) -> Callable[[str], Array | None]:
    calls = {call.path: call for call in site_calls(ir.load(directory / ONNX_FILE))}
    biases = {bias_of(path): base_bias(call) for path, call in calls.items()}

    def weight(path: str) -> Array | None:
        if (bias := biases.get(path)) is not None:
            return bias.numpy()[None]
        if path not in calls:
            return None
        linear = calls[path].linear
        matrix = matrix_of(gv.present(linear.inputs[1]), path)
        turned = matrix.T if linear.attributes.get_int("transB", 0) else matrix
        return turned * linear.attributes.get_float("alpha", 1.0)

    return weight


def _of_checkpoint(directory: Path) -> Callable[[str], Array | None]:
    checkpoint = Checkpoint(directory)
    stored = stored_linears(checkpoint)

    @cache
    def modules() -> dict[str, Any]:
        return dict(load_model(checkpoint, "float32").named_modules())

    def weight(path: str) -> Array | None:
        if stored is not None and path in stored.paths:
            return dense(stored.weight(path)).float().numpy().T
        is_bias = path not in modules()
        module = modules().get(path.removesuffix(bias_of("")) if is_bias else path)
        if not isinstance(module, torch.nn.Linear | Conv1D):
            return None
        if is_bias:
            return None if module.bias is None else module.bias.detach().numpy()[None]
        matrix: Array = module.weight.detach().numpy()
        return matrix if isinstance(module, Conv1D) else matrix.T

    return weight
