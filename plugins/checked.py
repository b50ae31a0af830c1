"""Arguments of public functions, and values of JSON, compared with their annotations."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import EnumType
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_value

P = ParamSpec("P")
ReturnT = TypeVar("ReturnT")
Kinds = tuple[type, ...]

# What is taken for a type beside what has it: numpy's numbers and arrays.
_ALSO: Mapping[type, Kinds] = {int: (Integral,), float: (Real,), Sequence: (np.ndarray,)}
_hints = functools.cache(typing.get_type_hints)
_REMEMBERED = 64  # types that a function was given; classes made at run time are no leak
_OF_NUMBERS = (int, Integral, Real)  # which Python counts bool among


def checked(function: Callable[P, ReturnT]) -> Callable[P, ReturnT]:
    """Refuse arguments of other types than the function's annotations name.

    A container is looked at from outside: any sequence is a `Sequence[int]`, and so is an array.
    The function returned raises ConfigError, which names the argument. It takes half a microsecond:
    types of arguments by position that were taken are remembered, where they alone decide.
    """
    where = function.__qualname__.removesuffix(".__init__")
    names = tuple(inspect.signature(function).parameters)
    taken: set[Kinds] = set()

    @functools.cache
    def kinds() -> dict[str, Kinds]:  # later: a class is not there while its methods are made
        return dict.fromkeys(names, (object,)) | _kinds_by_name(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ReturnT:
        given = tuple(map(type, args))
        if given not in taken:
            for name, value in zip(names, args, strict=False):
                _check(where, name, value, kinds()[name])
            if len(taken) < _REMEMBERED and _types_decide(given, [kinds()[name] for name in names]):
                taken.add(given)
        for name, value in kwargs.items():
            _check(where, name, value, kinds().get(name, (object,)))
        return function(*args, **kwargs)

    return call


def check_fields(instance: Any) -> None:
    """Refuse fields of a dataclass of other types than its annotations name.

    Raises:
        ConfigError: there is one; the message names it.
    """
    cls: Any = type(instance)
    for name, kinds in _kinds_by_name(cls).items():
        _check(cls.__name__, name, getattr(instance, name), kinds)


def check_items(what: str, items: Iterable[object], kind: type) -> None:
    """Refuse items of another class, for containers that `checked` does not look into.

    Raises:
        ConfigError: there is one.
    """
    for item in items:
        if not isinstance(item, kind):
            raise ConfigError(f"{what} hold {short_value(item)}, expected {kind.__name__} alone")


def check_range(what: str, value: float | None, low: int, high: int | None = None) -> None:
    """Refuse a number below `low` or above `high`; None is taken.

    Raises:
        ConfigError: it is out of range.
    """
    if value is not None and not (low <= value and (high is None or value <= high)):  # NaN too
        allowed = f"from {low} to {high}" if high is not None else f"{low} or more"
        raise ConfigError(f"{what} is {value}, expected a whole number {allowed}")


def check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    """Refuse what is none of the choices.

    Raises:
        ConfigError: it is none.
    """
    if value not in choices:
        raise ConfigError(f"{what} is {value!r}; choose from: {', '.join(choices)}")


def _check(where: str, name: str, value: object, kinds: Kinds) -> None:
    also = [kind for added in _ALSO.values() for kind in added]
    taken = tuple(k for k in kinds if k not in _OF_NUMBERS) if type(value) is bool else kinds
    if not isinstance(value, taken):
        own = [kind for kind in kinds if kind not in also]
        choices = ["None" if kind is type(None) else kind.__name__ for kind in own]
        raise ConfigError(
            f"{where}: {name} is {short_value(value)} ({type(value).__name__}), expected "
            f"{' or '.join(choices)}"
        )


def _types_decide(given: Kinds, expected: Sequence[Kinds]) -> bool:
    """Whether other values of the same types are taken, too: not those of a protocol or proxies."""
    return all(
        not any(getattr(kind, "_is_protocol", False) for kind in kinds) and issubclass(one, kinds)
        for one, kinds in zip(given, expected, strict=False)
    )


@functools.cache
def _kinds_by_name(annotated: Any) -> dict[str, Kinds]:
    return {name: _kinds(hint) for name, hint in _hints(annotated).items()}


def _kinds(hint: Any) -> Kinds:
    """Classes that a value of this type is an instance of, one of them at least."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return tuple(dict.fromkeys(kind for choice in arguments for kind in _kinds(choice)))
    if origin is typing.Literal:
        return tuple({type(choice) for choice in arguments})
    kind = origin or hint
    if kind is Any or not isinstance(kind, type):  # or a type variable
        return (object,)
    return (kind, *_ALSO.get(kind, ()))


# -------------------------------------------------------------------------------- values of JSON


class UnknownFieldError(ValueError):
    """An object has a field that its dataclass does not know."""


def typed(hint: Any, value: object, where: str) -> Any:
    """Return a value of JSON as a type annotation has it, and all that it holds.

    Args:
        hint: of a scalar, a union of such or an enum of texts; of a dataclass, or one in a union,
            or `Mapping[str, X]`, made of an object, or of `tuple[X, ...]`, made of a list.
        value: what was read.
        where: what messages call it.

    Raises:
        UnknownFieldError: an object has a field that its dataclass lacks.
        ValueError: it has another type, or lacks a field; the message names the place.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType and isinstance(value, dict):
        hint = next(filter(dataclasses.is_dataclass, arguments), hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _filled(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(typed(arguments[0], item, where) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {n: typed(arguments[1], v, f"{where}[{shown(n)}]") for n, v in value.items()}
    if isinstance(hint, EnumType) and value in [*hint]:
        return hint(value)
    kinds = arguments if origin is types.UnionType else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        expected = " or ".join(map(_described, kinds))
        raise ValueError(f"{where} is {shown(value)}, expected {expected}")
    return value


def _described(kind: Any) -> str:
    if kind is Mapping or dataclasses.is_dataclass(kind):
        return "an object"
    if isinstance(kind, EnumType):
        return f"one of {', '.join(map(str, kind))}"
    return "a list" if kind is tuple else str(kind.__name__)


def _filled(kind: Any, fields: Mapping[str, Any], where: str) -> Any:
    hints, known = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name, field in known.items():
        if name not in fields and field.default is field.default_factory:  # there is neither
            raise ValueError(f"{name} is missing")
    if unknown := [name for name in fields if name not in known]:
        raise UnknownFieldError(f"{shown(unknown[0])} is not known to this release")
    return kind(**{n: typed(hints[n], value, f"{where}.{n}") for n, value in fields.items()})
