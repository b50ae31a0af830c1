"""Shape checks of a plugin node: a group shape from its inputs, or an error by input name."""

import math
from collections.abc import Sequence
from typing import Any

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import check_shape

Shape = Sequence[int]


def group_shape(operator: Operator, shapes: Sequence[Shape], dtype: str) -> GroupShape:
    """Return the group that a node computes.

    Args:
        operator: the node's.
        shapes: of x [..., k], A_1 [k, r_1], B_1 [r_1, n_1], ..., and the addends [..., n_i].
        dtype: of all tensors.

    Raises:
        TensorError: shapes that do not fit together, or an empty batch.
        ConfigError: a dtype or a number of sites that the kernels do not have.
    """
    x = shapes[0]
    sites = tuple(_site(operator, shapes, site) for site in range(operator.sites))
    shape = GroupShape(math.prod(x[:-1]), x[-1], sites, dtype, operator.has_addend)
    if shape.m == 0:
        raise TensorError(
            f"{operator.name}: x has shape {list(x)}, an empty batch; run the engine with one "
            "token or more"
        )
    check_shape(shape)
    return shape


def check_ranges(operator: Operator, inputs: Sequence[Any]) -> None:
    """Check the smallest and the largest shapes of a profile.

    Args:
        operator: the node's.
        inputs: TensorRT's `DynamicPluginTensorDesc` of every input.

    Raises:
        TensorError: shapes that do not fit together.
    """
    for shapes in ([item.min for item in inputs], [item.max for item in inputs]):
        group_shape(operator, shapes, "float32")  # the dtype matters to nothing here


def changed_dims(
    operator: Operator, planned: Sequence[Shape], found: Sequence[Sequence[int]]
) -> TensorError:
    """Return the error of a call whose inputs have other shapes than it was planned for."""
    pairs = zip(operator.input_names, planned, found, strict=False)
    changed = [
        f"{name} has shape {list(now[:])}, planned was {list(before)}"
        for name, before, now in pairs
        if now != before
    ]
    differences = "; ".join(changed) or f"{len(found)} inputs, planned were {len(planned)}"
    return TensorError(
        f"TensorRT runs the node with other shapes than it told: {differences}. "
        "Nothing was launched; run the prompt again, and report this with the version of TensorRT"
    )


def _site(operator: Operator, shapes: Sequence[Shape], site: int) -> SiteShape:
    x, (a, b) = shapes[0], (shapes[index] for index in operator.factors(site))
    if len(a) != 2 or len(b) != 2 or x[-1] != a[0] or a[1] != b[0]:
        raise TensorError(
            f"{operator.name}, site {site}: A {list(a)} and B {list(b)} do not fit x {list(x)}; "
            "expected A [k, r] and B [r, n]"
        )
    if operator.has_addend:
        _check_addend([*x[:-1], b[1]], shapes[operator.addend(site)], f"{operator.name}, {site}")
    return SiteShape(b[1], b[0])


def _check_addend(expected: Shape, found: Shape, label: str) -> None:
    """The kernels read an addend as the output is written: nothing is broadcast."""
    if list(found) != list(expected):
        raise TensorError(f"{label}: the addend is {list(found)}, expected {list(expected)}")
