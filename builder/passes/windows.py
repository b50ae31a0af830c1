"""Window: what a convolution reads for each element of its output."""

from dataclasses import dataclass
from math import prod

import onnx_ir as ir


@dataclass(frozen=True)
class Window:
    """What a convolution reads for each element of its output, by spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]  # in front of all axes, then behind them
    dilations: tuple[int, ...]

    @classmethod
    def of(cls, conv: ir.Node, kernel: tuple[int, ...]) -> "Window":
        """Read a node's attributes."""
        ones, zeros = (1,) * len(kernel), (0,) * (2 * len(kernel))
        return cls(
            kernel,
            tuple(conv.attributes.get_ints("strides", ones)),
            tuple(conv.attributes.get_ints("pads", zeros)),
            tuple(conv.attributes.get_ints("dilations", ones)),
        )

    @property
    def taps(self) -> int:
        """The number of elements of the kernel."""
        return prod(self.kernel)


def refusal(conv: ir.Node) -> str:
    """Return why the weight of a convolution is no matrix; empty if it is one."""
    if (groups := conv.attributes.get_int("group", 1)) != 1:
        return f"it is a convolution of {groups} groups"
    pads = conv.attributes.get_string("auto_pad", "NOTSET")
    return "" if pads == "NOTSET" else f"its convolution has auto_pad {pads}"
