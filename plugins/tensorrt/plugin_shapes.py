"""Shape checks of a plugin node: a group shape from its inputs, or an error by input name."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import check_shape

Shape = Sequence[int]


def group_shape(
    operator: Operator, shapes: Sequence[Shape], dtype: str, columns: Sequence[int] = ()
) -> GroupShape:
    """Return the group that a node computes.

    Args:
        operator: the node's.
        shapes: of its inputs; without slots x [..., k], A_1 [k, r_1], B_1 [r_1, n_1], ..., and the
            addends [..., n_i].
        dtype: of all tensors but slot and rank.
        columns: of nodes with slots, their attribute.

    Raises:
        TensorError: shapes that do not fit together, or an empty batch.
        ConfigError: a dtype or a number of sites that the kernels do not have.
    """
    x, stacks = shapes[0], _stacks(operator, shapes, columns) if operator.has_slots else None
    sites = tuple(_site(operator, shapes, site) for site in range(operator.sites))
    shape = GroupShape(math.prod(x[:-1]), x[-1], sites, dtype, operator.has_addend, stacks)
    if shape.m == 0:
        raise TensorError(
            f"{operator.name}: x has shape {list(x)}, an empty batch; run the engine with one "
            "token or more"
        )
    check_shape(shape)
    return shape


def check_ranges(operator: Operator, inputs: Sequence[Any], columns: Sequence[int] = ()) -> None:
    """Check the smallest and the largest shapes of a profile.

    Args:
        operator: the node's.
        inputs: TensorRT's `DynamicPluginTensorDesc` of every input.
        columns: as in `group_shape`.

    Raises:
        TensorError: shapes that do not fit together.
    """
    for shapes in ([item.min for item in inputs], [item.max for item in inputs]):
        group_shape(operator, shapes, "float32", columns)  # the dtype matters to nothing here


def changed_dims(
    operator: Operator, planned: Sequence[Shape], found: Sequence[Sequence[int]]
) -> TensorError:
    """Return the error of a call whose inputs have other shapes than it was planned for."""
    names = operator.input_names
    pairs = zip(names, planned, found, strict=False)
    changed = [
        f"{name} has shape {list(now[:])}, planned was {list(before)}"
        for name, before, now in pairs
        if now != before
    ]
    differences = "; ".join(changed) or f"{len(found)} inputs, expected {len(names)}"
    return TensorError(
        f"TensorRT runs the node with other shapes than it told: {differences}. "
        "Nothing was launched; run the prompt again, and report this with the version of TensorRT"
    )


def _stacks(operator: Operator, shapes: Sequence[Shape], columns: Sequence[int]) -> StackShape:
    x, slot, rank = shapes[:3]
    stacked = [
        shapes[index][:1] for site in range(operator.sites) for index in operator.factors(site)
    ]
    if len(rank) != 2 or any(list(slots) != [rank[0]] for slots in stacked):
        raise TensorError(
            f"{operator.name}: rank {list(rank)} does not fit the stacks, of "
            f"{[*itertools.chain(*stacked)]} slots; expected rank [slots, sites]"
        )
    if list(slot) != [math.prod(x[:-1])]:
        raise TensorError(
            f"{operator.name}: slot {list(slot)} does not fit x {list(x)}; expected one for each "
            "token"
        )
    if len(columns) != operator.sites or not all(0 <= column < rank[1] for column in columns):
        raise TensorError(
            f"{operator.name}: its columns are {list(columns)}; expected {operator.sites} of rank "
            f"{list(rank)}; the ONNX file was made by another release: build the engine again"
        )
    return StackShape(rank[0], rank[1], tuple(columns))


def _site(operator: Operator, shapes: Sequence[Shape], site: int) -> SiteShape:
    x, (a, b) = shapes[0], (shapes[index] for index in operator.factors(site))
    axes, slots = (3, "slots, ") if operator.has_slots else (2, "")
    if len(a) != axes or len(b) != axes or x[-1] != a[-2] or a[-1] != b[-2]:
        raise TensorError(
            f"{operator.name}, site {site}: A {list(a)} and B {list(b)} do not fit x {list(x)}; "
            f"expected A [{slots}k, r] and B [{slots}r, n]"
        )
    n, rank = b[-1], b[-2]
    if operator.has_addend:
        _check_addend([*x[:-1], n], shapes[operator.addend(site)], f"{operator.name}, {site}")
    return SiteShape(n, rank)


def _check_addend(expected: Shape, found: Shape, label: str) -> None:
    """The kernels read an addend as the output is written: nothing is broadcast."""
    if list(found) != list(expected):
        raise TensorError(f"{label}: the addend is {list(found)}, expected {list(expected)}")
