"""IPluginV3 callbacks of a LoRA node, for TensorRT and TensorRT-RTX.

An exception that leaves a callback is lost or worse: from `get_workspace_size` TensorRT builds an
engine without workspace, from others it may end the process. So callbacks note what went wrong in
`failures` and return, and whoever builds or runs an engine looks there.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from trt_lora.plugins.contract.operators import COLUMNS, DOMAIN_VERSION, SLOT_INPUTS, Operator
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launch_plan import workspace_bytes
from trt_lora.plugins.kernels.launcher import Kernels, PlannedCall
from trt_lora.plugins.tensorrt.plugin_failures import PluginFailures
from trt_lora.plugins.tensorrt.plugin_shapes import changed_dims, check_ranges, group_shape

VERSION = str(DOMAIN_VERSION)
NAMESPACE = ""  # where the parser looks for a plugin that overrides a function of the same name
FIELDS = (
    "sites",
    "adds",
    COLUMNS,
)  # all that a plan must say of a node; the rest is in its tensors

_dims_of = attrgetter("dims")  # mapped: faster by a tenth than in a comprehension

F = TypeVar("F", bound=Callable[..., Any])


class Owner(Protocol):
    """State shared by all plugins of a flavour."""

    @property
    def trt(self) -> Any:
        """The flavour's module."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The kernel launcher."""
        ...

    @property
    def failures(self) -> PluginFailures:
        """Collected errors of the callbacks."""
        ...

    def make(self, operator: Operator, node: str = "", columns: Sequence[int] = ()) -> Any:
        """Return a new plugin for the node of that name, where it is known."""
        ...

    def let_go(self, plugin: Any) -> None:
        """Hold a plugin no longer."""
        ...


def safe(otherwise: object = None) -> Callable[[F], F]:
    """Make a callback that notes an exception and returns `otherwise`."""

    def decorate(callback: F) -> F:
        @functools.wraps(callback)
        def guarded(self: Any, *args: Any) -> Any:
            try:
                return callback(self, *args)
            except Exception as error:  # whatever it is, TensorRT must not see it
                self.owner.failures.note(f"{self.label}: {error}")
                return otherwise

        return cast(F, guarded)

    return decorate


class PluginNode:
    """The callbacks of one node; its other bases come from the flavour."""

    def __init__(
        self, owner: Owner, operator: Operator, node: str, columns: Sequence[int] = ()
    ) -> None:
        for base in bases(owner.trt):
            base.__init__(self)
        self.owner, self.operator, self.node = owner, operator, node
        self.columns = tuple(columns)  # with slots: the attribute
        self.label = f"{operator.name} {node}".rstrip()
        self.plugin_name, self.plugin_version = operator.name, VERSION
        self.plugin_namespace = NAMESPACE
        self.num_outputs = operator.sites
        first = operator.factors(0)[0]
        end = first + 2 * operator.sites
        # Of the inputs: every A, every B, every addend, and with slots those of the rows.
        self._a, self._b = slice(first, end, 2), slice(first + 1, end, 2)
        self._y, self._rows = slice(end, None), slice(1, first)
        self._forget_shapes()

    def _forget_shapes(self) -> None:
        self._may_change = False  # TensorRT has told shapes since the last call
        self._dims: list[list[int]] = []  # of every input, in the last call
        self._planned: PlannedCall | None = None  # for them, by a call: it knows the GPU

    def get_capability_interface(self, kind: Any) -> Any:
        """Return this object, of which TensorRT's bindings keep a reference at every call."""
        self.owner.let_go(self)
        return self

    def destroy(self) -> None:
        """Forget everything: the bindings never give their references back."""
        vars(self).clear()

    def get_output_data_types(self, types: Sequence[Any]) -> list[Any]:
        return [types[0]] * self.operator.sites

    @safe(otherwise=())
    def get_output_shapes(self, inputs: Sequence[Any], scalars: Any, builder: Any) -> list[Any]:
        """Return x's leading dimensions and B's last, for every site."""
        return [self._output_shape(inputs, site) for site in range(self.operator.sites)]

    def _output_shape(self, inputs: Sequence[Any], site: int) -> Any:
        x, b = inputs[0], inputs[self.operator.factors(site)[1]]
        shape = self.owner.trt.DimsExprs(len(x))
        for axis in range(len(x) - 1):
            shape[axis] = x[axis]
        shape[len(x) - 1] = b[len(b) - 1]
        return shape

    @safe(otherwise=False)
    def supports_format_combination(
        self, position: int, tensors: Sequence[Any], count: int
    ) -> bool:
        """Row-major tensors, all of one floating-point type but slot and rank."""
        trt, tensor, first = self.owner.trt, tensors[position].desc, tensors[0].desc
        floats = (trt.DataType.HALF, trt.DataType.BF16, trt.DataType.FLOAT)
        fits = tensor.type == first.type and tensor.type in floats
        if self.operator.has_slots and 1 <= position <= len(SLOT_INPUTS):
            fits = tensor.type == trt.DataType.INT32
        return fits and tensor.format == trt.TensorFormat.LINEAR

    def get_valid_tactics(self) -> list[int]:
        """Return no tactics: plans are built without a GPU, launches are chosen at run time."""
        return []

    def set_tactic(self, tactic: int) -> None:
        """Do nothing: there are no tactics."""

    @safe()
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._forget_shapes()  # nothing else changes the types of a node, and dims tell none
        check_ranges(self.operator, inputs, self.columns)

    @safe(otherwise=0)
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Enough for the largest shapes of the profile, on any GPU."""
        largest = self._group([i.max for i in inputs], inputs[0].desc.type)
        return workspace_bytes(largest)

    @safe()
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Let the next call have other shapes: `enqueue` reads those of the tensors it is given.

        Not read here too, at 0.6 us a tensor: TensorRT calls this wherever an address has changed.
        """
        self._may_change = True

    @safe()
    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        dims = list(map(_dims_of, input_desc))
        # Compared by TensorRT, ten times as fast as tuple() reads each.
        if dims != self._dims or self._planned is None:
            self._planned = self._plan(dims, input_desc, stream)
        self._may_change = False
        a, b, y, rows = inputs[self._a], inputs[self._b], inputs[self._y], inputs[self._rows]
        self._planned.launch(GroupBuffers(inputs[0], a, b, y, outputs, workspace, *rows), stream)

    def _plan(self, dims: Sequence[Any], tensors: Sequence[Any], stream: int) -> PlannedCall:
        """Plan the call for its own shapes; refuse those that TensorRT never announced."""
        if not (self._may_change or self._dims):
            raise TensorError("TensorRT runs the node before it has told the shapes")
        is_announced = self._may_change or dims == self._dims
        if not is_announced or len(dims) != len(self.operator.input_names):
            raise changed_dims(self.operator, self._dims, dims)
        sizes = [list(each[:]) for each in dims]
        planned = self.owner.kernels.planned(self._group(sizes, tensors[0].type), stream)
        self._dims = sizes
        return planned

    def get_fields_to_serialize(self) -> Any:
        values = (self.operator.sites,), (int(self.operator.has_addend),), self.columns
        self._arrays = {
            name: np.array(value, np.int32)
            for name, value in zip(FIELDS, values, strict=True)
            if value
        }
        return plugin_fields(self.owner.trt, self._arrays)

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    def clone(self) -> Any:
        """Return a plugin that knows the shapes; it may be for another GPU, so not their plan."""
        clone = self.owner.make(self.operator, self.node, self.columns)
        clone._may_change, clone._dims = self._may_change, self._dims
        return clone

    def _group(self, shapes: Sequence[Sequence[int]], kind: Any) -> GroupShape:
        return group_shape(self.operator, shapes, _dtype(kind), self.columns)


def bases(trt: Any) -> tuple[Any, ...]:
    names = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime")
    return tuple(getattr(trt, name) for name in names)


def plugin_fields(trt: Any, arrays: Mapping[str, Any]) -> Any:
    """TensorRT's fields point into the arrays, which must live as long."""
    kind = trt.PluginFieldType.INT32
    return trt.PluginFieldCollection([trt.PluginField(n, a, kind) for n, a in arrays.items()])


def _dtype(kind: Any) -> str:
    names = {"HALF": "float16", "BF16": "bfloat16", "FLOAT": "float32"}
    if kind.name not in names:
        raise TensorError(f"tensors are {kind.name}; choose from: {', '.join(names)}")
    return names[kind.name]
