"""Nodes with slots in TensorRT-RTX's real bindings: their inputs, shapes and fields."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.tensor_descriptions import described, ranges

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape, StackShape
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins
from trt_lora.plugins.tensorrt.plugin_shapes import check_ranges, group_shape

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")

ADD = Operator(2, has_addend=True, has_slots=True)
COLUMNS = (9, 4)
# x, slot and rank, A and B of two sites, two addends: 5 slots, 12 sites of the engine.
SHAPES = [
    (2, 3, 8),
    (6,),
    (5, 12),
    (5, 8, 4),
    (5, 4, 16),
    (5, 8, 1),
    (5, 1, 6),
    (2, 3, 16),
    (2, 3, 6),
]
SHAPE = GroupShape(
    6, 8, (SiteShape(16, 4), SiteShape(6, 1)), "float16", True, StackShape(5, 12, COLUMNS)
)
ADDRESSES = ([10, 51, 52, 11, 12, 21, 22, 13, 23], [14, 24], 99)
BUFFERS = GroupBuffers(10, [11, 21], [12, 22], [13, 23], [14, 24], 99, 51, 52)


def tensors(trt: Any, shapes: list[tuple[int, ...]] = SHAPES) -> list[Any]:
    """What TensorRT says of the node's inputs."""
    found = described(trt, shapes)
    for description in found[1:3]:
        description.type = trt.DataType.INT32
    return found


def changed(index: int, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [*SHAPES[:index], shape, *SHAPES[index + 1 :]]


def test_a_call_launches_the_group_with_its_stacks_and_rows(
    trt: Any, plugins: LoraPlugins, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def planned(*args: Any) -> Any:
        calls.append(args)
        return SimpleNamespace(launch=lambda *args: calls.append(args))

    monkeypatch.setattr(plugins, "kernels", SimpleNamespace(planned=planned))
    plugin = plugins.make(ADD, "qkv", COLUMNS)
    plugin.on_shape_change(tensors(trt), [])
    plugin.attach_to_context(None).enqueue(tensors(trt), [], *ADDRESSES, 7)
    assert failures == []
    assert calls == [(SHAPE, 7), (BUFFERS, 7)]


def test_slot_and_rank_are_integers_and_nothing_else_is(trt: Any, plugins: LoraPlugins) -> None:
    plugin = plugins.make(ADD, "qkv", COLUMNS)

    def taken(descriptions: list[Any]) -> list[bool]:
        wrapped = [SimpleNamespace(desc=each) for each in descriptions]
        count = len(wrapped)
        return [plugin.supports_format_combination(i, wrapped, count) for i in range(count)]

    assert all(taken(tensors(trt)))
    assert taken(described(trt, SHAPES)) == [index not in (1, 2) for index in range(9)]


def test_an_output_is_as_wide_as_the_last_dimension_of_b(trt: Any, plugins: LoraPlugins) -> None:
    shapes = [trt.DimsExprs(len(shape)) for shape in SHAPES]
    found = plugins.make(ADD, "qkv", COLUMNS).get_output_shapes(shapes, [], None)
    assert [len(shape) for shape in found] == [3, 3]


def test_a_plan_says_the_columns_of_the_ranks(
    trt: Any, plugins: LoraPlugins, failures: list[str]
) -> None:
    fields = plugins.make(ADD, "qkv", COLUMNS).get_fields_to_serialize()
    creator = next(each for each in plugins.creators if each.operator == ADD)
    again = creator.create_plugin("qkv", fields, trt.TensorRTPhase.RUNTIME)
    assert failures == []
    assert (again.operator, again.columns) == (ADD, COLUMNS)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (changed(1, (2,)), r"LoraSlotsAdd2: slot \[2\] does not fit x \[2, 3, 8\]; expected one"),
        (changed(1, (2, 3)), r"slot \[2, 3\] does not fit x"),
        (changed(2, (4, 12)), r"rank \[4, 12\] does not fit the stacks, of \[5, 5, 5, 5\] slots"),
        (changed(2, (5,)), r"rank \[5\] does not fit the stacks"),
        (changed(3, (4, 8, 4)), r"does not fit the stacks, of \[4, 5, 5, 5\] slots"),
        (changed(2, (5, 9)), r"its columns are \[9, 4\]; expected 2 of rank \[5, 9\]"),
        (changed(3, (5, 4)), r"site 0: A \[5, 4\] and B .* expected A \[slots, k, r\]"),
        (changed(4, (5, 3, 16)), r"site 0: A \[5, 8, 4\] and B \[5, 3, 16\] do not fit x"),
        (changed(7, (2, 3, 15)), r"the addend is \[2, 3, 15\], expected \[2, 3, 16\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: list[tuple[int, ...]], message: str, trt: Any
) -> None:
    with pytest.raises(TensorError, match=message):
        group_shape(ADD, shapes, "float16", COLUMNS)
    with pytest.raises(TensorError, match=message):
        check_ranges(ADD, ranges(trt, SHAPES, shapes), COLUMNS)


@pytest.mark.parametrize("columns", [(), (1,), (1, -1), (1, 2, 3)])
def test_a_node_without_a_column_for_each_site_is_refused(columns: tuple[int, ...]) -> None:
    with pytest.raises(TensorError, match=r"columns are .* expected 2 of .* build the engine"):
        group_shape(ADD, SHAPES, "float16", columns)
