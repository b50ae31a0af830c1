"""Shapes of a node: what does not fit is refused by name."""

from typing import Any

import pytest
from support.tensor_descriptions import SHAPES, changed, ranges

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.errors import ConfigError, TensorError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.plugins.tensorrt.plugin_shapes import check_ranges, group_shape

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")

ADD = Operator(2, has_addend=True)


@pytest.fixture
def trt() -> Any:
    return TENSORRT_RTX.load()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (changed(1, (7, 4)), r"LoraAdd2, site 0: A \[7, 4\] and B \[4, 16\] do not fit x"),
        (changed(4, (2, 6)), r"LoraAdd2, site 1: A \[8, 1\] and B \[2, 6\] do not fit x"),
        (changed(1, (8,)), r"site 0: A \[8\]"),
        (changed(5, (1, 3, 16)), r"the addend is \[1, 3, 16\], expected \[2, 3, 16\]"),
        (changed(6, (6,)), r"the addend is \[6\], expected \[2, 3, 6\]"),
        ([(2, 3, 8), (8, 0), (0, 16), *SHAPES[3:]], r"a rank is 0"),
        ([(2, 3, 8), (8, 513), (513, 16), *SHAPES[3:]], r"a rank is 513"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: list[tuple[int, ...]], message: str, trt: Any
) -> None:
    with pytest.raises(TensorError, match=message):
        group_shape(ADD, shapes, "float16")
    with pytest.raises(TensorError, match=message):
        check_ranges(ADD, ranges(trt, SHAPES, shapes))


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'int8' is unknown"):
        group_shape(ADD, SHAPES, "int8")
