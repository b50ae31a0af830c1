"""LoRA operators as ahead-of-time TensorRT plugins: PTX in the plan, no Python at run time.

TensorRT calls these quickly deployable plugins with an ahead-of-time implementation. Their rules
are those of python/packaging/bindings_wheel/tensorrt/plugin in its repository, 10.10 to 11.1.
"""

import functools
import importlib
import inspect
import itertools
import math
import operator as arithmetic
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import GenericAlias
from typing import Any

from trt_lora.plugins.contract.operators import DOMAIN, Operator
from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.plugins.kernels.constants import THREADS
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import TILES, Chip, fused_bytes, plan_launches, slices
from trt_lora.plugins.tensorrt.aot_kernel import kernel_ptx

# A node with these attributes, in the copy of the graph that TensorRT parses, becomes the plugin,
# even where the model has a function of that name. Without `plugin_namespace` the function wins.
NODE_ATTRIBUTES: Mapping[str, str | int] = {"plugin_namespace": DOMAIN, "aot": 1}

_TYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}  # in TensorRT's words
_SHARED_BYTES = 48 * 1024  # more has to be asked for before a launch, and TensorRT launches
_MOST_TILES = 65535  # the second dimension of a grid


def register_aot_plugins(trt: Any, largest: Iterable[GroupShape], chip: Chip) -> None:
    """Make the operators of an engine known to full TensorRT, for the graph that it parses next.

    Every kernel is compiled here, half a second each, because an exception in a callback reaches
    nobody. A later call replaces the dtype, sizes and chip of an earlier one.

    Args:
        trt: the module `tensorrt`, 10.10 or newer.
        largest: of every node, the shapes with the most rows m and the highest ranks of all
            profiles; they must fit one launch.
        chip: the GPU that the plan is for, as a rule the one that builds it. From compute
            capability 9.0 on the PTX works in clusters of 8 and needs 9.0 to load; below, it needs
            8.0. The multiprocessors bound the grids, for speed: the results are the same on others.

    Raises:
        BackendError: the module has no such plugins, or NVRTC is missing.
        ConfigError: the GPU is too old, the dtypes differ, or a group has no launch that fits.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    api = _plugin_api(trt)
    found = _by_operator(largest, chip)
    plugins = [_compiled(api, operator, shapes, chip) for operator, shapes in found.items()]
    for plugin in plugins:  # once all of them are ready
        _register(plugin)


@dataclass(frozen=True)
class _Plugin:
    """One operator's answers to TensorRT, which asks while it builds."""

    api: Any  # the module tensorrt.plugin
    operator: Operator
    dtype: str
    chip: Chip
    kernels: Mapping[int, tuple[str, bytes]]  # rows for a CTA: name and PTX

    def outputs(self, *inputs: Any) -> tuple[Any, ...]:
        """Descriptions of the outputs: x's leading dimensions, then n."""
        x = inputs[0]
        leading = tuple(x.shape_expr)[:-1]
        return tuple(
            self.api.from_shape_expr((*leading, n), dtype=x.dtype) for n, _ in self._sites(inputs)
        )

    def combinations(self, *_descriptions: Any) -> list[Any]:
        """One dtype for all, linear, and the rows for a CTA as tactics: every profile takes one.

        TensorRT keeps one kernel for each tactic: one chosen by a profile's shapes instead would be
        replaced by the next profile's.
        """
        types = ", ".join([_TYPES[self.dtype]] * (self.operator.inputs + self.operator.sites))
        return [self.api.AutoTuneCombination(types, "LINEAR", tuple(self.kernels))]

    def implementation(self, *descriptions: Any) -> tuple[str, bytes, Any, Any]:
        """Kernel name, PTX, launch parameters, and the integers of `kernel_parameters`."""
        *inputs, _outputs, rows = descriptions
        *leading, k = inputs[0].shape_expr
        m = functools.reduce(arithmetic.mul, leading)
        sites = self._sites(inputs)
        sizes = [self.api.SymInt32(size) for size in (m, k, *itertools.chain(*sites))]
        name, ptx = self.kernels[rows]
        return name, ptx, self._launch(m, sites, rows), self.api.SymIntExprs.from_tuple(sizes)

    def _sites(self, inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
        """(n, rank) of every site: the dimensions of its B."""
        shapes = [
            inputs[self.operator.factors(i)[1]].shape_expr for i in range(self.operator.sites)
        ]
        return [(shape[1], shape[0]) for shape in shapes]

    def _launch(self, m: Any, sites: list[tuple[Any, Any]], rows: int) -> Any:
        """`launch.fused_launch` in expressions."""
        api, cluster = self.api, self.chip.cluster
        symbols = (SiteShape(_Size(api, n), _Size(api, rank)) for n, rank in sites)  # type: ignore[arg-type]
        shape = GroupShape(1, 1, tuple(symbols), self.dtype, self.operator.has_addend)
        parts: Any = slices(shape)
        shared: Any = fused_bytes(shape, rows)
        placed = self.chip.multiprocessors // cluster
        clusters = api.min(api.cdiv(parts.expression, cluster), placed)
        launch = api.KernelLaunchParams()
        launch.grid_x = api.max(clusters, 1) * cluster
        launch.grid_y = api.cdiv(m, rows)
        launch.block_x = THREADS
        launch.shared_mem = shared.expression
        return launch


@dataclass(frozen=True)
class _Size:
    """An expression of TensorRT that computes like an int, so that launch.py says how, for both.

    TensorRT's own take numbers on their right side only, and have a function for the ceiling.
    """

    api: Any
    expression: Any

    def __add__(self, other: "_Size | int") -> "_Size":
        return replace(self, expression=self.expression + _plain(other))

    def __mul__(self, other: "_Size | int") -> "_Size":
        return replace(self, expression=self.expression * _plain(other))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, divisor: int) -> "_Quotient":
        return _Quotient(self, divisor)


@dataclass(frozen=True)
class _Quotient:
    """A pending division, for `math.ceil`."""

    size: _Size
    divisor: int

    def __ceil__(self) -> _Size:
        return replace(self.size, expression=self.size.api.cdiv(self.size.expression, self.divisor))


def _plain(value: _Size | int) -> Any:
    return value.expression if isinstance(value, _Size) else value


class _Described:
    """A function of any number of arguments, with the signature that TensorRT reads and checks."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self._function = function
        self.__signature__ = signature

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _compiled(api: Any, operator: Operator, shapes: Sequence[GroupShape], chip: Chip) -> _Plugin:
    dtype, arch = shapes[0].dtype, "compute_90" if chip.cluster > 1 else "compute_80"
    tiles = _tiles(operator, shapes)
    kernels = {rows: kernel_ptx(operator, dtype, rows, arch) for rows in tiles}
    return _Plugin(api, operator, dtype, chip, kernels)


def _register(plugin: _Plugin) -> None:
    """Name the plugin once in a process, for TensorRT allows no more; its functions each time."""
    api, identity = plugin.api, f"{DOMAIN}::{plugin.operator.name}"
    inputs, tensor = plugin.operator.input_names, api.TensorDesc
    if not hasattr(getattr(api.op, DOMAIN, None), plugin.operator.name):
        outputs = GenericAlias(tuple, (tensor,) * plugin.operator.sites)
        api.register(identity)(_Described(plugin.outputs, _signature(inputs, tensor, outputs)))
    kernel = GenericAlias(tuple, (str, bytes, api.KernelLaunchParams, api.SymIntExprs))
    signature = _signature((*inputs, "outputs", "tactic"), returns=kernel)
    api.aot_impl(identity)(_Described(plugin.implementation, signature))
    signature = _signature((*inputs, "outputs"))
    api.autotune(identity)(_Described(plugin.combinations, signature))


def _signature(
    names: Iterable[str],
    annotation: Any = inspect.Parameter.empty,
    returns: Any = inspect.Signature.empty,
) -> inspect.Signature:
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, positional, annotation=annotation) for name in names]
    return inspect.Signature(parameters, return_annotation=returns)


def _plugin_api(trt: Any) -> Any:
    try:
        api = importlib.import_module(f"{trt.__name__}.plugin")
    except ImportError:
        api = None
    if not hasattr(api, "KernelLaunchParams"):  # older ones have plugins that need Python
        raise BackendError(
            f"{trt.__name__} {trt.__version__} has no ahead-of-time plugins: TensorRT has them "
            "from 10.10 on, TensorRT-RTX has not; build the engine with another form of the plugin"
        )
    return api


def _by_operator(largest: Iterable[GroupShape], chip: Chip) -> dict[Operator, list[GroupShape]]:
    found: dict[Operator, list[GroupShape]] = {}
    for shape in largest:
        plan_launches(shape, chip)  # refuses what no kernel takes
        found.setdefault(Operator(len(shape.sites), shape.has_addend), []).append(shape)
    dtypes = sorted({shape.dtype for shapes in found.values() for shape in shapes})
    if len(dtypes) > 1:
        raise ConfigError(
            f"the LoRA tensors of an engine have one dtype, not {' and '.join(dtypes)}; "
            "build the engine with one --dtype"
        )
    return found


def _tiles(operator: Operator, shapes: Sequence[GroupShape]) -> tuple[int, ...]:
    """Rows for a CTA with which every shape fits one launch; no more than m needs."""
    m, total_rank = max(shape.m for shape in shapes), max(shape.total_rank for shape in shapes)
    tiles = tuple(
        rows
        for rows in TILES[: bisect_left(TILES, m) + 1]
        if math.ceil(m / rows) <= _MOST_TILES
        and all(fused_bytes(shape, rows) <= _SHARED_BYTES for shape in shapes)
    )
    if not tiles:
        raise ConfigError(
            f"{operator.name} with {m} rows and ranks that add up to {total_rank} does not fit one "
            f"launch: in {_SHARED_BYTES} bytes of shared memory a CTA takes too few rows for "
            f"{_MOST_TILES} CTAs to take them all; lower --max-lora-rank, --max-batch-size or "
            "--max-seq-len, make smaller groups, or build with another form of the plugin"
        )
    return tiles
