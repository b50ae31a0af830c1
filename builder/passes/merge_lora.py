"""Pass that merges an adapter into the weights of a graph: W + A @ B, without LoRA nodes.

1. Only the weights that change are written; the others stay in the engine's own file.
2. A weight that other nodes read too, such as a tied embedding, keeps its value for them.
3. A site that is called twice is merged once.
4. A weight in codes becomes one of floats, for the codes hold no sum, and x is rounded no more.
5. A convolution's weight takes the sum in its own layout. Experts, embeddings and modules that are
   saved whole are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import read_coded
from trt_lora.builder.passes.remove_lora import RemoveLoRA
from trt_lora.builder.passes.site_calls import SiteCall, site_calls
from trt_lora.plugins.contract.modules import is_embedding
from trt_lora.plugins.contract.sites import VECTORS, dummy_value
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

_ALIGNMENT = 4096  # of a weight in its file, so that it can be mapped


@dataclass(frozen=True)
class MergeLoRA(ir.passes.InPlacePass):
    """The pass, for one set of LoRA inputs."""

    manifest: Manifest  # of the engine
    inputs: Mapping[str, Array]  # A [k, r] and B [r, n] by the engine's names
    file: Path  # for the weights that change; it lies beside the merged model

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add A @ B to the weight of every call in place, and take LoRA out of the model.

        Raises:
            ModelError: the weight of a site is no constant matrix, or it is of experts.
        """
        if experts := [site.path for site in self.manifest.sites if site.experts]:
            raise ModelError(f"{experts[0]} is of experts, which are not merged into a graph")
        for site in self.manifest.sites:
            names = self.manifest.binding_names.pair(site.path)
            is_whole = is_embedding(site.path) or site.path in self.manifest.saved_modules
            if is_whole and all(np.any(self.inputs[name]) for name in names):
                what = "an embedding or saved whole"
                raise ModelError(f"{site.path} is {what}, which is not merged into a graph")
        with self.file.open("wb") as file:
            merger = _Merger(model.graph, file, self.file)
            for call in list(site_calls(model)):
                delta = self._delta(call)
                if delta.any():
                    merger.replace_weight(call, delta)
        RemoveLoRA(self.manifest.lora_inputs)(model)
        return ir.passes.PassResult(model, modified=True)

    def _delta(self, call: SiteCall) -> npt.NDArray[np.float64]:
        """A @ B [k, n] of the inputs that the site should read, whatever its node does read."""
        names = self.manifest.binding_names.pair(call.path)
        self._check_vectors(call.path)
        a, b = (np.asarray(self.inputs[name], np.float64) for name in names)
        return a @ b

    def _check_vectors(self, path: str) -> None:
        """Refuse what is no sum with a weight."""
        for factor in VECTORS if self.manifest.lora_vectors else ():
            name = self.manifest.binding_names.binding(factor, path)
            if (np.asarray(self.inputs[name]) != dummy_value(factor)).any():
                raise ModelError(f"{name} is set: DoRA and biases are not merged into a graph")


@dataclass(frozen=True)
class _Merger:
    """Changes the weights of one graph."""

    graph: ir.Graph
    file: BinaryIO  # open
    path: Path  # of the file
    merged: dict[tuple[int, str], ir.Value] = field(default_factory=dict)

    def replace_weight(self, call: SiteCall, delta: npt.NDArray[np.float64]) -> None:
        """Let the linear of a call read its weight with the delta added."""
        old = gv.present(call.linear.inputs[1])
        key = id(old), call.path
        if key not in self.merged:
            self.merged[key] = self._written(call, old, delta)
        if call.linear.op_type != "Conv":  # which reads no patches
            call.linear.replace_input_with(0, call.x)
        call.linear.replace_input_with(1, self.merged[key])

    def _written(self, call: SiteCall, old: ir.Value, delta: npt.NDArray[np.float64]) -> ir.Value:
        attributes, is_kernel = call.linear.attributes, call.linear.op_type == "Conv"
        weight = _kernel_of(old, call.path) if is_kernel else matrix_of(old, call.path)
        change = delta / attributes.get_float("alpha", 1.0)
        is_turned = is_kernel or bool(attributes.get_int("transB", 0))
        values = weight + (change.T if is_turned else change).reshape(weight.shape)
        stored = values.astype(weight.dtype)  # rounded once, to nearest even
        self.file.write(bytes(-self.file.tell() % _ALIGNMENT))
        tensor = ir.ExternalTensor(
            self.path.name,
            self.file.tell(),
            stored.nbytes,
            ir.DataType.from_numpy(stored.dtype),
            shape=ir.Shape(stored.shape),
            name=f"merged_{len(self.merged)}_{call.path}",
            base_dir=self.path.parent,
        )
        stored.tofile(self.file)
        new = ir.val(tensor.name, tensor.dtype, tensor.shape, const_value=tensor)
        self.graph.register_initializer(new)
        return new


def matrix_of(value: ir.Value, path: str) -> Array:
    """Return the constant [k, n], or [n, k] of a Gemm, that a linear reads directly or transposed.

    Raises:
        ModelError: it is none.
    """
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        permutation = node.attributes.get_ints("perm", (1, 0))
        return matrix_of(node.inputs[0], path).transpose(*permutation)
    if node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        return matrix_of(node.inputs[0], path)
    if (coded := read_coded(value)) is not None:
        return coded.dequantised()
    if value.const_value is None or len(value.const_value.shape) != 2:
        raise ModelError(f"the weight of {path} is no constant matrix: it cannot be merged")
    return value.const_value.numpy()


def _kernel_of(value: ir.Value, path: str) -> Array:
    """The constant [n, channels, *kernel] of a convolution.

    Raises:
        ModelError: it is none.
    """
    if value.const_value is None:
        raise ModelError(f"the weight of {path} is no constant: it cannot be merged")
    return value.const_value.numpy()
