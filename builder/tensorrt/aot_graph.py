"""LoRA nodes as TensorRT's ahead-of-time plugins, in a copy of the graph.

Not yet run: full TensorRT cannot be installed where our tests run.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.tensorrt.profiles import Profiles
from trt_lora.plugins.contract.operators import DOMAIN, operator_named
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launcher import chip_of
from trt_lora.plugins.tensorrt.aot_plugins import NODE_ATTRIBUTES, register_aot_plugins
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS
from trt_lora.runtime.memory.cuda import call


def use_aot_plugins(trt: Any, model: ir.Model, profiles: Profiles) -> None:
    """Make the operators known to TensorRT, and let a model ask for them.

    The kernels are planned for the GPU that is current, which is the plan's.

    Raises:
        BackendError: this TensorRT has no ahead-of-time plugins, or there is no GPU.
        ConfigError: a group does not fit one launch.
    """
    register_aot_plugins(trt, largest_groups(model, profiles), chip_of(call("cudaGetDevice")))
    for node in _lora_nodes(model):
        for name, value in NODE_ATTRIBUTES.items():
            node.attributes[name] = ir.convenience.convert_attribute(name, value)


def largest_groups(model: ir.Model, profiles: Profiles) -> list[GroupShape]:
    """Return the largest shapes of every LoRA node, over all profiles."""
    rows = max(math.prod(ranges[INPUT_IDS].max) for ranges in profiles.values())
    largest = {name: r.max for ranges in profiles.values() for name, r in ranges.items()}
    return [_group(node, rows, largest) for node in _lora_nodes(model)]


def check_plugin_layers(trt: Any, network: Any, model: ir.Model) -> None:
    """Raise if the parser has inlined a LoRA node, which it does without a word.

    Raises:
        ModelError: there are fewer plugin layers than LoRA nodes.
    """
    wanted = sum(1 for _ in _lora_nodes(model))
    layers = (network.get_layer(index) for index in range(network.num_layers))
    made = sum(layer.type == trt.LayerType.PLUGIN_V3 for layer in layers)
    if made != wanted:
        raise ModelError(f"TensorRT made {made} plugin layers of {wanted} LoRA nodes")


def _group(node: ir.Node, rows: int, largest: Mapping[str, tuple[int, ...]]) -> GroupShape:
    operator = gv.present(operator_named(node.op_type))  # the pass inserts no other
    pairs = [
        [gv.present(node.inputs[i]) for i in operator.factors(s)] for s in range(operator.sites)
    ]
    shapes = [[largest[str(value.name)] for value in pair] for pair in pairs]
    sites = tuple(SiteShape(n=b[1], rank=b[0]) for _, b in shapes)
    dtype = gv.present(pairs[0][0].dtype).numpy().name
    return GroupShape(rows, shapes[0][0][0], sites, dtype, operator.has_addend)


def _lora_nodes(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if node.domain == DOMAIN)
