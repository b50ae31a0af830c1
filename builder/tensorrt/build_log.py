"""Kernels of an engine, parsed from the verbose log of TensorRT's builder.

With `ProfilingVerbosity.DETAILED` the list has a line for every kernel, and needs no GPU:

    Name: __myl_FcAdd_myl1_8, LayerType: runtime_fusion, ..., StreamId: 0, Metadata: ...

`_myl<number>_<step>` ends the names that the compiler Myelin gives; each optimization profile has a
number of its own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+),.*StreamId: (?P<stream>\d+)")
_STEP = re.compile(r"_myl(?P<profile>\d+)_\d+$")

_NOT_KERNELS = frozenset({"shape_call", "signal", "wait", "NoOp", "ShapeHostToDevice"})
_PAD_COPY = "ReplConc"  # how Myelin names a copy that pads a tensor of unknown size


@dataclass(frozen=True)
class Kernel:
    """One kernel of one optimization profile."""

    name: str
    kind: str  # TensorRT's LayerType: gemm, kgen, runtime_fusion, custom_layer, ...
    profile: int  # counted from 0
    stream: int

    @property
    def is_pad_copy(self) -> bool:
        """True for a copy that pads an input, on every run."""
        return _PAD_COPY in self.name


def read_kernels(lines: Iterable[str]) -> list[Kernel]:
    """Return the kernels of a build, by its verbose log, in the order of their run."""
    matches = [match for line in lines if (match := _LINE.match(line))]
    steps = [(match, _STEP.search(match["name"])) for match in matches]
    compiled = [(match, int(step["profile"])) for match, step in steps if step]
    order = sorted({number for _, number in compiled})
    return [
        Kernel(match["name"], match["kind"], order.index(number), int(match["stream"]))
        for match, number in compiled
        if match["kind"] not in _NOT_KERNELS
    ]
