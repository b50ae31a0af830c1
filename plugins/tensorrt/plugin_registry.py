"""Plugin creators of the LoRA operators in TensorRT's registry, for both flavours.

They reach a network through the ONNX parser alone: TensorRT-RTX has no other way.
"""

import functools
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from trt_lora.plugins.contract.operators import COLUMNS, OPERATORS, SLOT_OPERATORS, Operator
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels.launcher import Kernels
from trt_lora.plugins.tensorrt.plugin_failures import PluginFailures
from trt_lora.plugins.tensorrt.plugin_node import (
    FIELDS,
    NAMESPACE,
    VERSION,
    PluginNode,
    bases,
    plugin_fields,
    safe,
)

_REGISTERING = Lock()  # a second thread waits; the registry would refuse its creators


class LoraPlugins:
    """The plugins of one flavour in this process."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.kernels = Kernels()
        self.failures = PluginFailures()
        self.plugin_class = type("LoraPlugin", (PluginNode, *bases(trt)), {})
        creator_class = type("LoraCreator", (_Creator, trt.IPluginCreatorV3One), {})
        operators = (*OPERATORS, *SLOT_OPERATORS)
        self.creators = [creator_class(self, operator) for operator in operators]
        # By id, those of which no interface was asked for. TensorRT holds addresses, so Python must
        # hold the objects; for good, because one that is freed after `destroy` ends the process.
        self._kept: dict[int, Any] = {}

    def make(self, operator: Operator, node: str = "", columns: Sequence[int] = ()) -> Any:
        """Return a new plugin for the node of that name, where it is known."""
        plugin = self.plugin_class(self, operator, node, columns)
        self._kept[id(plugin)] = plugin
        return plugin

    def let_go(self, plugin: Any) -> None:
        """Hold a plugin no longer: who is given its interface holds it."""
        self._kept.pop(id(plugin), None)


def register_plugins(trt: Any) -> LoraPlugins:
    """Register a creator for every operator with the flavour's registry, once.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`, as `Flavour.load` returns it.

    Raises:
        BackendError: the registry refuses, as when another library has taken the names.
    """
    with _REGISTERING:
        return _registered(trt)


@functools.cache  # TensorRT's registry is one for the process, and so is this
def _registered(trt: Any) -> LoraPlugins:
    plugins = LoraPlugins(trt)
    registry = trt.get_plugin_registry()
    for creator in plugins.creators:
        if not registry.register_creator(creator, NAMESPACE):
            raise BackendError(
                f"TensorRT refuses the plugin {creator.name}: is another copy of trt_lora loaded?"
            )
    return plugins


class _Creator:
    """Makes the plugins of one operator; its other base comes from the flavour."""

    def __init__(self, owner: LoraPlugins, operator: Operator) -> None:
        owner.trt.IPluginCreatorV3One.__init__(self)
        self.owner, self.operator = owner, operator
        self.name = self.label = operator.name
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        self._arrays = {name: np.array([], np.int32) for name in FIELDS}
        self.field_names = plugin_fields(owner.trt, self._arrays)

    @safe()
    def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
        """Make the plugin of a node, from the ONNX file or from a plan."""
        values = {field.name: [int(value) for value in field.data] for field in fields}
        columns = values.pop(COLUMNS, [])
        if phase == self.owner.trt.TensorRTPhase.RUNTIME:
            _check_fields(self.operator, values)
        return self.owner.make(self.operator, name, columns)


def _check_fields(operator: Operator, fields: dict[str, list[int]]) -> None:
    expected = {"sites": [operator.sites], "adds": [int(operator.has_addend)]}
    if fields != expected:
        raise BackendError(
            f"the plan says {fields} of a {operator.name}, expected {expected}; "
            "it was built by another release: build the engine again"
        )
