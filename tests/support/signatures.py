"""Signatures of the real library, which the fakes must have too."""

from typing import Any


def signature_of(method: Any) -> list[list[str]]:
    """Parameter names of every overload of a method of the real library, read from its help."""
    overloads = [line for line in (method.__doc__ or "").splitlines() if ") -> " in line]
    names = []
    for line in overloads:
        inside = line[line.index("(") + 1 : line.rindex(") -> ")]
        names.append([part.split(":")[0].strip() for part in inside.split(", ") if ":" in part])
    return names
