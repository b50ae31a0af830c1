"""`checked`: what an annotation takes, what it refuses, and what the refusal says."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pytest

from trt_lora.plugins.checked import check_fields, check_items, checked
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
