"""The public names of a package and their members, with what is said of each."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

_FIELD = re.compile(r"^    (\w+): [^#\n]*?  # (.*(?:\n    # .*)*)", re.MULTILINE)
_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")  # before a class in an annotation

_QUOTED = re.compile(r"(?<=[>:] )'([A-Z][\w\[\], |]*)'")
_WIDTH = 96


def names_of(package: ModuleType) -> list[tuple[str, Any]]:
    """Return the public names with what they are, in the order of `__all__`."""
    return [(name, getattr(package, name)) for name in package.__all__]


def signature_of(name: str, member: Any) -> str:
    """Return how it is called; of a property its type. `self` and modules' names are left out."""
    if isinstance(member, property):
        returned = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
        return f"{name}: {_short(inspect.formatannotation(returned))}"
    signature = inspect.signature(member)
    parameters = [p for n, p in signature.parameters.items() if n not in ("self", "cls")]
    text = _short(str(signature.replace(parameters=parameters)))
    if len(name + text) <= _WIDTH:
        return name + text
    lines = [f"    {_short(str(line))},\n" for line in _with_star(parameters)]
    return f"{name}(\n{''.join(lines)}){text.rpartition(')')[2]}"


def _with_star(parameters: list[inspect.Parameter]) -> list[inspect.Parameter | str]:
    """The parameters, with the star that is before those which have to be named."""
    named = [p.kind is p.KEYWORD_ONLY for p in parameters]
    place = named.index(True) if True in named else len(parameters)
    star: list[inspect.Parameter | str] = ["*"] if True in named else []
    return [*parameters[:place], *star, *parameters[place:]]


def _short(text: str) -> str:
    """A signature without the names of modules, quotes around classes, and `-> None`."""
    return _QUOTED.sub(r"\1", _MODULE.sub("", text)).removesuffix(" -> None")


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties that this project wrote, the class's own first."""
    seen = set(fields_of(cls))
    for base in cls.__mro__:
        if base.__module__.startswith("trt_lora."):
            for name, member in vars(base).items():
                told = _told(member)
                if not name.startswith("_") and name not in seen and told is not None:
                    seen.add(name)
                    yield name, told


def _told(member: Any) -> Any:
    """The function of a method, or the property; None for what is neither."""
    if isinstance(member, cached_property):
        return property(member.func)
    function = getattr(member, "__func__", member)  # of a class method
    return function if callable(function) or isinstance(function, property) else None


def fields_of(cls: type) -> dict[str, str]:
    """Return what the comments behind the fields of a dataclass say; empty where there is none."""
    if not dataclasses.is_dataclass(cls):
        return {}
    found = {n: " ".join(text.replace("\n    # ", " ").split()) for n, text in _comments(cls)}
    return {f.name: found.get(f.name, "") for f in dataclasses.fields(cls) if f.repr}


def _comments(cls: type) -> list[tuple[str, str]]:
    return [pair for base in cls.__mro__[:-1][::-1] for pair in _FIELD.findall(_source(base))]


def _source(cls: type) -> str:
    return inspect.getsource(cls) if cls.__module__.startswith("trt_lora.") else ""
