"""Kernels of an engine, parsed from the verbose log of TensorRT's builder.

With `ProfilingVerbosity.DETAILED` the list has a line for every kernel, and needs no GPU:

    Name: __myl_FcAdd_myl1_8, LayerType: runtime_fusion, ..., StreamId: 0, Metadata: ...

`_myl<number>_<step>` ends the names that the compiler Myelin gives; each optimization profile has a
number of its own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Layout:
    """One way to build an engine, and what it runs."""

    name: str
    kernels: tuple[Kernel, ...]

    def count(self, profile: int) -> int:
        """Return the number of kernels of an optimization profile."""
        return sum(kernel.profile == profile for kernel in self.kernels)

    def moved_to(self, profile: int) -> "Layout":
        """Return it as that of another profile, the only one it was built for."""
        return Layout(self.name, tuple(replace(each, profile=profile) for each in self.kernels))

    def pad_copies(self, profile: int) -> int:
        """Return how many of them copy a tensor to pad it."""
        return sum(kernel.is_pad_copy for kernel in self.kernels if kernel.profile == profile)


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
