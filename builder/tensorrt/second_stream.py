"""A hidden output that gives LoRA nodes a stream of their own.

TensorRT-RTX puts layers of a plan on a second stream where it sees work that may run in parallel,
and does not know what a plugin costs. A slice of the first layer's keys, one value of each row and
head, that nothing but an output reads is such work, for one kernel a step: where a layer's keys are
large, every LoRA node but the first layer's q, k and v then runs beside the product that it is
added to, between a signal and a wait that TensorRT places. Slots have such work of their own.
"""

import math
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.contract.step import CACHE, SECOND_STREAM
from trt_lora.runtime.generation.decoding.step_inputs import cache_names
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype

_KEYS = cache_names(CACHE, 1)[0]
_LEAST_BYTES = (
    8 << 20
)  # of a layer's keys; below them no plan of TensorRT-RTX 1.7.1 took the stream


def with_second_stream(manifest: Manifest) -> Manifest:
    """Return the manifest of an engine, whose plan has the output where it may do something.

    It needs the plugin and one adapter at a time, and TensorRT-Edge-LLM's runtime binds no outputs
    but those that it knows.
    """
    is_open = manifest.binding_names is not BindingNames.EDGELLM and not manifest.max_loras
    takes = manifest.lora_plugin == "plugin" and is_open and _key_bytes(manifest) >= _LEAST_BYTES
    return replace(manifest, second_stream=takes)


def _key_bytes(manifest: Manifest) -> int:
    """How much the first layer's keys of all rows take."""
    keys = next((each for each in manifest.inputs if each.name == _KEYS), None)
    if keys is None:
        return 0
    sizes = [size for size in keys.shape if isinstance(size, int)]
    return manifest.max_batch_size * math.prod(sizes) * storage_dtype(keys.dtype).itemsize


def add_second_stream(model: ir.Model) -> None:
    """Add the output [batch, kv_heads, 1, 1] to a graph with a static cache, in place."""
    gv.require_inputs(model, _KEYS)
    keys, tape = gv.graph_input(model, _KEYS), Tape()
    starts, ends, axes = (gv.constant(tape, place) for place in ([0, 0], [1, 1], [2, 3]))
    output = tape.op("Slice", [keys, starts, ends, axes])
    model.graph.extend(gv.unnamed(tape))
    batch, heads = list(gv.present(keys.shape))[:2]
    output.name, output.dtype = SECOND_STREAM, gv.present(keys.dtype)
    output.shape = ir.Shape([batch, heads, 1, 1])
    model.graph.outputs.append(output)
