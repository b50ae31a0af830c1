"""`tensorrt.plugin` without TensorRT: what its Python code checks, and the calls of one build.

Recorded from python/packaging/bindings_wheel/tensorrt/plugin of NVIDIA's repository, 10.10 to 11.1.
What lies behind it in C++ (timing, PTX loading, launches) is not here.
"""

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

INT32 = range(-(2**31), 2**31)
TYPES = {"FP32": "FLOAT", "FP16": "HALF", "BF16": "BF16"}  # of a combination, as data types


@dataclass(frozen=True)
class IDimensionExpr:
    """A number that is known when the sizes of the inputs are."""

    evaluate: Callable[[Mapping[str, int]], int]


class IExprBuilder:
    """Makes expressions, where TensorRT allows it: while it asks for shapes or launches."""

    OPERATIONS: ClassVar[dict[str, Callable[[int, int], int]]] = {
        "SUM": lambda a, b: a + b,
        "SUB": lambda a, b: a - b,
        "PROD": lambda a, b: a * b,
        "FLOOR_DIV": lambda a, b: a // b,
        "CEIL_DIV": lambda a, b: -(-a // b),
        "MAX": max,
        "MIN": min,
    }

    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(lambda _sizes: value)

    def symbol(self, dimension: str | int) -> IDimensionExpr:
        if isinstance(dimension, int):
            return self.constant(dimension)
        return IDimensionExpr(lambda sizes: sizes[dimension])

    def operation(self, name: str, a: IDimensionExpr, b: IDimensionExpr) -> IDimensionExpr:
        compute = self.OPERATIONS[name]
        return IDimensionExpr(lambda sizes: compute(a.evaluate(sizes), b.evaluate(sizes)))


class SymIntExpr:
    """Arithmetic with an expression on the left: there is no reflected form, and no truth value."""

    builder: ClassVar[IExprBuilder | None] = None  # while TensorRT allows expressions

    def __init__(self, value: Any = None) -> None:
        self._expr: Any = None
        if isinstance(value, int):
            self._expr = SymIntExpr.builder and SymIntExpr.builder.constant(value)
        elif isinstance(value, IDimensionExpr):
            self._expr = value
        elif isinstance(value, SymIntExpr):
            self._expr = value._expr

    def _op(self, name: str, other: Any) -> "SymIntExpr":
        other = SymIntExpr(other) if isinstance(other, int) else other
        assert SymIntExpr.builder is not None, "expressions are made while TensorRT asks for them"
        return SymIntExpr(SymIntExpr.builder.operation(name, self._expr, other._expr))

    def __add__(self, other: Any) -> "SymIntExpr":
        return self._op("SUM", other)

    def __sub__(self, other: Any) -> "SymIntExpr":
        return self._op("SUB", other)

    def __mul__(self, other: Any) -> "SymIntExpr":
        return self._op("PROD", other)

    def __floordiv__(self, other: Any) -> "SymIntExpr":
        return self._op("FLOOR_DIV", other)

    def __bool__(self) -> bool:
        raise RuntimeError("Cannot evaluate symbolic expression as boolean")


class SymInt32(SymIntExpr):
    """The one type of an integer for a kernel; the result of arithmetic is none until wrapped."""


class ShapeExpr(SymInt32):
    """A dimension; a dummy, of which only sums of dummies come, before shapes are asked for."""

    def __init__(self, value: Any = None) -> None:
        super().__init__(value)
        self.is_fake = self._expr is None

    def _op(self, name: str, other: Any) -> "ShapeExpr":
        return ShapeExpr() if self.is_fake else ShapeExpr(super()._op(name, other))


def _top_level(name: str) -> Callable[[Any, Any], SymIntExpr]:
    def apply(first: Any, second: Any) -> SymIntExpr:
        both = isinstance(first, int) and isinstance(second, int)
        _require(not both, "Both arguments cannot be 'int's")
        left = ShapeExpr(first) if isinstance(first, int) else first
        result: SymIntExpr = left._op(name, second)
        return result

    return apply


class SymExprs:
    """A row of expressions."""

    element: ClassVar[type[SymIntExpr]] = SymIntExpr

    def __init__(self, expressions: Iterable[Any]) -> None:
        self._exprs = list(expressions)

    @classmethod
    def from_tuple(cls, values: Sequence[Any]) -> "SymExprs":
        wrapped = (v if isinstance(v, cls.element) else cls.element(v) for v in values)
        return cls(wrapped)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._exprs)

    def __getitem__(self, index: int) -> Any:
        return self._exprs[index]

    def __len__(self) -> int:
        return len(self._exprs)


class SymIntExprs(SymExprs):
    """The integers of a kernel."""


class ShapeExprs(SymExprs):
    """The dimensions of a tensor."""

    element = ShapeExpr


@dataclass(frozen=True)
class TensorDesc:
    """What a plugin is told of a tensor; nobody may change an input's."""

    shape_expr: ShapeExprs
    dtype: Any


def from_shape_expr(shape_expr: Any, dtype: Any) -> TensorDesc:
    """Describe an output."""
    assert isinstance(shape_expr, tuple), "a list is taken for ready ShapeExprs"
    shape = ShapeExprs.from_tuple(shape_expr)
    assert isinstance(shape, ShapeExprs)
    return TensorDesc(shape, dtype)


class KernelLaunchParams:
    """Seven 32-bit expressions, and no other attribute."""

    FIELDS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")

    def __init__(self) -> None:
        for name in self.FIELDS:
            setattr(self, name, 0 if name == "shared_mem" else 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.FIELDS:
            raise AttributeError(f"KernelLaunchParams object has no attribute '{name}'")
        self.__dict__[name] = SymInt32(value)


class AutoTuneCombination:
    """Types and layouts of inputs, then outputs, and the tactics for them."""

    def __init__(self, io_types: str, layouts: str, tactics: Iterable[int]) -> None:
        self.types = [TYPES[name.strip()] for name in io_types.split(",")]
        self.layouts = [name.strip() for name in layouts.split(",")]
        self.tactics = list(tactics)
        assert len(self.layouts) in (1, len(self.types))
        assert all(isinstance(tactic, int) and tactic > 0 for tactic in self.tactics)


@dataclass
class PluginDef:
    """What is known of a registered plugin."""

    register_func: Callable[..., Any]
    inputs: list[str]
    outputs: int
    aot_impl_func: Callable[..., Any] | None = None
    autotune_func: Callable[..., Any] | None = None


class Plugins(ModuleType):
    """The module `tensorrt.plugin`: decorators that look at signatures, as NVIDIA's do."""

    TensorDesc, ShapeExpr, SymInt32, SymIntExprs = TensorDesc, ShapeExpr, SymInt32, SymIntExprs
    KernelLaunchParams, AutoTuneCombination = KernelLaunchParams, AutoTuneCombination
    from_shape_expr = staticmethod(from_shape_expr)
    cdiv, max, min = (staticmethod(_top_level(name)) for name in ("CEIL_DIV", "MAX", "MIN"))

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.op = SimpleNamespace()
        self.known: dict[str, PluginDef] = {}

    def register(self, plugin_id: str) -> Callable[[Any], Any]:
        """Take the shapes of a new plugin: annotated inputs, without defaults, and outputs."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            namespace, name = plugin_id.split("::")
            plugins = self.op.__dict__.setdefault(namespace, SimpleNamespace())
            _require(not hasattr(plugins, name), f"already has a definition for '{name}'")
            signature = inspect.signature(function)
            for parameter in signature.parameters.values():
                _check_input(parameter)
            outputs = _tuple_of(signature.return_annotation)
            _require(all(issubclass(output, TensorDesc) for output in outputs), "Return types")
            plugin = PluginDef(function, list(signature.parameters), len(outputs))
            self.known[plugin_id] = plugin
            setattr(plugins, name, plugin)
            return function

        return decorate

    def aot_impl(self, plugin_id: str) -> Callable[[Any], Any]:
        """Take the kernel of a plugin: the inputs by name, `outputs`, `tactic`; four results."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            results = _tuple_of(self._checked(plugin_id, function, "outputs", "tactic"))
            _require(len(results) == 4, f"Return annotation is {results}")
            _require({*results[:2]} <= {str, bytes}, f"name and kernel are {results[:2]}")
            _require(issubclass(results[2], KernelLaunchParams), f"launch is {results[2]}")
            _require(issubclass(results[3], SymExprs), f"extra arguments are {results[3]}")
            self.known[plugin_id].aot_impl_func = function
            return function

        return decorate

    def autotune(self, plugin_id: str) -> Callable[[Any], Any]:
        """Take the types and tactics of a plugin: the inputs by name, `outputs`."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            self._checked(plugin_id, function, "outputs")
            self.known[plugin_id].autotune_func = function
            return function

        return decorate

    def _checked(self, plugin_id: str, function: Any, *last: str) -> Any:
        """The return annotation of a function that takes a plugin's inputs and these."""
        _require(plugin_id in self.known, f"Plugin {plugin_id} is not registered")
        signature = inspect.signature(function)
        expected = [*self.known[plugin_id].inputs, *last]
        _require(list(signature.parameters) == expected, f"{signature} does not match {expected}")
        return signature.return_annotation


def _check_input(parameter: inspect.Parameter) -> None:
    kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    _require(parameter.kind in kinds, f"{parameter.name} is not positional-or-keyword")
    _require(issubclass(parameter.annotation, TensorDesc), f"{parameter.name} has no annotation")
    _require(parameter.default is parameter.empty, f"{parameter.name} has a default value")


def _tuple_of(annotation: Any) -> tuple[Any, ...]:
    _require(typing.get_origin(annotation) is tuple, f"Return argument is of type {annotation}")
    return typing.get_args(annotation)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Kernel:
    """What TensorRT keeps in the plan of a node, for one tactic."""

    name: str
    ptx: bytes
    launch: dict[str, IDimensionExpr]
    integers: list[IDimensionExpr]
    outputs: list[list[IDimensionExpr]]  # their shapes

    def launch_at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the launch parameters for the sizes of the inputs."""
        return {name: _int32(each.evaluate(sizes)) for name, each in self.launch.items()}

    def arguments(
        self, inputs: Sequence[int], sizes: Mapping[str, int], outputs: Sequence[int]
    ) -> list[tuple[str, int]]:
        """Return (PTX type, value) of each argument: addresses of inputs, integers, outputs."""
        integers = (_int32(each.evaluate(sizes)) for each in self.integers)
        return [
            *(("u64", address) for address in inputs),
            *(("u32", integer) for integer in integers),
            *(("u64", address) for address in outputs),
        ]


def _int32(value: int) -> int:
    if value not in INT32:
        raise OverflowError(f"{value} is no 32-bit integer")
    return value


class FakeTensorRT(ModuleType):
    """The module `tensorrt` with `tensorrt.plugin`, and the build of a node."""

    def __init__(self) -> None:
        super().__init__("fake_tensorrt_with_plugins")
        self.__version__ = "10.10.0"
        self.plugin = Plugins(f"{self.__name__}.plugin")

    def build(
        self, plugin_id: str, shapes: Sequence[Sequence[str | int]], dtype: str
    ) -> dict[int, Kernel]:
        """Return the kernel of each tactic for a node whose inputs have these shapes and dtype."""
        plugin = self.plugin.known[plugin_id]
        assert len(shapes) == len(plugin.inputs)
        dummies = [TensorDesc(ShapeExprs([ShapeExpr() for _ in each]), dtype) for each in shapes]
        types = [output.dtype for output in plugin.register_func(*dummies)]
        assert types == [dtype] * plugin.outputs
        builder = SymIntExpr.builder = IExprBuilder()
        try:
            inputs = [
                TensorDesc(ShapeExprs([ShapeExpr(builder.symbol(d)) for d in each]), dtype)
                for each in shapes
            ]
            outputs = plugin.register_func(*inputs)
            return {
                tactic: self._kernel(plugin, inputs, outputs, tactic)
                for tactic in self._tactics(plugin, inputs, outputs, dtype)
            }
        finally:
            SymIntExpr.builder = None

    def _tactics(self, plugin: PluginDef, inputs: Any, outputs: Any, dtype: str) -> list[int]:
        assert plugin.autotune_func is not None
        (combination,) = plugin.autotune_func(*inputs, outputs)
        assert combination.types == [dtype] * (len(inputs) + len(outputs))
        assert set(combination.layouts) == {"LINEAR"}
        tactics: list[int] = combination.tactics
        return tactics

    def _kernel(self, plugin: PluginDef, inputs: Any, outputs: Any, tactic: int) -> Kernel:
        assert plugin.aot_impl_func is not None, "the node asks for the ahead-of-time form"
        name, ptx, launch, integers = plugin.aot_impl_func(*inputs, outputs, tactic)
        assert isinstance(name, str)
        assert isinstance(ptx, bytes)
        assert isinstance(launch, KernelLaunchParams)
        if not all(isinstance(integer, SymInt32) for integer in integers):
            raise TypeError("Extra args must be a 'tensorrt.plugin.SymInt32'")
        return Kernel(
            name,
            ptx,
            {field: getattr(launch, field)._expr for field in KernelLaunchParams.FIELDS},
            [integer._expr for integer in integers],
            [[dimension._expr for dimension in output.shape_expr] for output in outputs],
        )


def install(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    """Return a fresh TensorRT that knows no plugin yet, importable until the test ends."""
    trt = FakeTensorRT()
    for module in (trt, trt.plugin):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return trt
