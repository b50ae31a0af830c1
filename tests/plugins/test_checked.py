"""`checked`: what an annotation takes, what it refuses, and what the refusal says."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pytest

from trt_lora.plugins.checked import (
    UnknownFieldError,
    check_choice,
    check_fields,
    check_items,
    check_range,
    checked,
    typed,
)
from trt_lora.plugins.errors import ConfigError


@runtime_checkable
class Named(Protocol):
    """Has a name."""

    @property
    def name(self) -> str:
        """It."""
        ...


@checked
def called(
    whole: int = 0,
    number: float = 0.0,
    flag: bool = False,
    path: str | Path | None = None,
    ids: Sequence[int] = (),
    items: Iterable[object] = (),
    named: Named | None = None,
    by_name: Mapping[str, int] | None = None,
    kind: Literal["a", "b"] = "a",
    *,
    anything: Any = None,
) -> str:
    """Take arguments."""
    return "called"


@pytest.mark.parametrize(
    "given",
    [
        {"whole": 3},
        {"whole": np.int32(3)},
        {"number": 3},
        {"number": np.float32(3)},
        {"number": np.int64(3)},
        {"flag": True},
        {"path": None},
        {"path": Path("x")},
        {"ids": [1]},
        {"ids": np.array([1])},
        {"ids": range(3)},
        {"items": (n for n in [1])},
        {"named": Path("x")},
        {"by_name": {}},
        {"kind": "b"},
        {"anything": object()},
    ],
)
def test_what_an_annotation_names_is_taken(given: dict[str, Any]) -> None:
    assert called(**given) == "called"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"whole": True}, r"called: whole is True \(bool\), expected int$"),
        ({"whole": 1.5}, r"whole is 1\.5 \(float\), expected int$"),
        ({"number": "1"}, r"number is '1' \(str\), expected float$"),
        ({"number": False}, r"number is False \(bool\), expected float$"),
        ({"flag": 1}, r"flag is 1 \(int\), expected bool$"),
        ({"path": b"x"}, r"path is b'x' \(bytes\), expected str or Path or None$"),
        ({"ids": {1}}, r"ids is \{1\} \(set\), expected Sequence$"),
        ({"items": 3}, r"items is 3 \(int\), expected Iterable$"),
        ({"named": "x"}, r"named is 'x' \(str\), expected Named or None$"),
        ({"by_name": [1]}, r"by_name is \[1\] \(list\), expected Mapping or None$"),
        ({"kind": 3}, r"kind is 3 \(int\), expected str$"),
    ],
)
def test_anything_else_is_refused_with_the_choices(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        called(**given)


def test_arguments_by_place_are_looked_at_too() -> None:
    with pytest.raises(ConfigError, match="called: number is 'x'"):
        called(1, "x")  # type: ignore[arg-type]


class Held:
    """Holds another."""

    @checked
    def __init__(self, other: "Held | None") -> None:
        """Hold it."""
        self.other = other


def test_a_constructor_is_called_by_its_class() -> None:
    Held(Held(None))
    with pytest.raises(ConfigError, match=r"Held: other is 3 \(int\), expected Held or None"):
        Held(3)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Options:
    """Two fields."""

    count: int | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_of_a_dataclass_are_looked_at() -> None:
    Options(3, ("a",))
    with pytest.raises(ConfigError, match=r"Options: count is '3' \(str\), expected int or None"):
        Options("3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Options: names is 'a'"):
        Options(names="a")  # type: ignore[arg-type]


def test_items_are_looked_at_where_one_asks_for_it() -> None:
    check_items("names", ["a", "b"], str)
    with pytest.raises(ConfigError, match="names hold 3, expected str alone"):
        check_items("names", ["a", 3], str)


@pytest.mark.parametrize(
    ("value", "allowed"), [(0, "from 1 to 3"), (4, "from 1 to 3"), (-1, "0 or more")]
)
def test_a_number_out_of_its_range_is_refused_with_the_range(value: int, allowed: str) -> None:
    low, high = (0, None) if value < 0 else (1, 3)
    for taken in (None, low, high):
        check_range("rows", taken, low, high)
    with pytest.raises(ConfigError, match=f"rows is {value}, expected a whole number {allowed}"):
        check_range("rows", value, low, high)


def test_what_is_none_of_the_choices_is_refused_with_them() -> None:
    check_choice("dtype", "a", ("a", "b"))
    with pytest.raises(ConfigError, match="dtype is 'c'; choose from: a, b"):
        check_choice("dtype", "c", ("a", "b"))


# ---------------------------------------------------------------------------------- values of JSON


class Kind(StrEnum):
    """Two texts."""

    ONE = "one"
    TWO = "two"


@dataclass(frozen=True)
class Part:
    """Has a default."""

    size: int
    share: float = 0.5


@dataclass(frozen=True)
class Whole:
    """Holds all that there can be."""

    kind: Kind
    parts: tuple[Part, ...]
    sizes: tuple[int | str, ...] = ()
    named: Mapping[str, int] = field(default_factory=dict)


JSON = {"kind": "two", "parts": [{"size": 1}, {"size": 2, "share": 3}], "sizes": [1, "n"]}


def test_a_value_of_json_becomes_what_the_annotations_say() -> None:
    parts = (Part(1), Part(2, 3))
    assert typed(Whole, JSON | {"named": {"a": 1}}, "x") == Whole(
        Kind.TWO, parts, sizes=(1, "n"), named={"a": 1}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "three"}, "x.kind is 'three', expected one of one, two"),
        ({"kind": [1]}, "x.kind is"),
        ({"parts": {}}, "x.parts is {}, expected a list"),
        ({"parts": [3]}, "x.parts is 3, expected an object"),
        ({"parts": [{"size": True}]}, "x.parts.size is True, expected int"),
        ({"parts": [{"size": 1, "share": "a"}]}, "x.parts.share is 'a', expected float"),
        ({"parts": [{}]}, "size is missing"),
        ({"sizes": [1.5]}, "x.sizes is 1.5, expected int or str"),
        ({"named": {"a": None}}, r"x.named['a'] is None, expected int"),
        ({"named": [1]}, "x.named is [1], expected an object"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        typed(Whole, JSON | change, "x")


def test_a_field_that_is_not_known_is_an_error_of_its_own() -> None:
    with pytest.raises(UnknownFieldError, match="'more' is not known to this release"):
        typed(Whole, JSON | {"more": 1}, "x")


def test_what_types_alone_do_not_decide_is_looked_at_at_every_call() -> None:
    @checked
    def name_of(named: Named, text: str = "") -> str:
        return named.name + text

    some: Any = SimpleNamespace
    assert name_of(some(name="a"), "b") == "ab"
    with pytest.raises(ConfigError, match="named is"):
        name_of(some(), "b")
