"""Arguments of public functions, compared with their annotations before anything is done."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_value

P = ParamSpec("P")
ReturnT = TypeVar("ReturnT")
Kinds = tuple[type, ...]

# What is taken for a type beside what has it: numpy's numbers and arrays.
_ALSO: Mapping[type, Kinds] = {int: (Integral,), float: (Real,), Sequence: (np.ndarray,)}
_OF_NUMBERS = (int, Integral, Real)  # which Python counts bool among


def checked(function: Callable[P, ReturnT]) -> Callable[P, ReturnT]:
    """Refuse arguments of other types than the function's annotations name.

    A container is looked at from outside: any sequence is a `Sequence[int]`, and so is an array.
    The function returned raises ConfigError, which names the argument. It takes half a microsecond.
    """
    where = function.__qualname__.removesuffix(".__init__")
    names = tuple(inspect.signature(function).parameters)

    @functools.cache
    def kinds() -> dict[str, Kinds]:  # later: a class is not there while its methods are made
        return dict.fromkeys(names, (object,)) | _kinds_by_name(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ReturnT:
        expected = kinds()
        for name, value in zip(names, args):  # noqa: B905 - strict would take longer
            if not isinstance(value, expected[name]) or value is True or value is False:
                _check(where, name, value, expected[name])
        for name, value in kwargs.items():
            _check(where, name, value, expected.get(name, (object,)))
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


@functools.cache
def _kinds_by_name(annotated: Any) -> dict[str, Kinds]:
    return {name: _kinds(hint) for name, hint in typing.get_type_hints(annotated).items()}


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
