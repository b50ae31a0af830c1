"""docs/python-api.md has every public name, as its docstring says it."""

import inspect
from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Any

import pytest
from support.python_api.members import fields_of, members_of, names_of, signature_of
from support.python_api.page import OF_STORE, PACKAGES, PAGE, markdown, page


def test_the_page_is_made_from_the_docstrings() -> None:
    made = "make it: PYTHONPATH=tests:src .venv/bin/python -m support.python_api.page"
    assert PAGE.read_text(encoding="utf-8") == page(), made


def undocumented(name: str, value: Any) -> Iterator[str]:
    """The name, and those of the members, about which nothing is said."""
    parts = [(name, value)]
    if isinstance(value, type):
        parts += [(f"{name}.{member}", found) for member, found in members_of(value)]
    for part, found in parts:
        said = inspect.getdoc(found) or ""
        if not said or said.startswith(f"{part}("):  # a dataclass has its own signature
            yield part


NAMES = [
    pytest.param(name, value, id=f"{package.__name__}.{name}")
    for package in PACKAGES
    for name, value in names_of(package)
] + [pytest.param(value.__name__, value, id=member) for member, value in OF_STORE.items()]


@pytest.mark.parametrize(("name", "value"), NAMES)
def test_a_public_name_and_its_members_have_docstrings(name: str, value: Any) -> None:
    assert list(undocumented(name, value)) == []


class Example:
    """A class."""

    def told(self, first: int, *, second: "Example | None" = None) -> None:
        """Say it.

        Args:
            first: of two,
                and more.
            second: an example.

        Raises:
            ValueError: never.

        And a line.
        """

    def untold(self) -> str:
        return ""


def test_a_member_without_a_docstring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Example, "__module__", "trt_lora.example")
    assert list(undocumented("Example", Example)) == ["Example.untold"]


def test_a_signature_is_short_and_sections_are_lists() -> None:
    assert (
        signature_of("told", Example.told) == "told(first: int, *, second: Example | None = None)"
    )
    assert list(markdown(inspect.getdoc(Example.told) or "")) == [
        "Say it.", "",
        "**Args**", "", "* `first`: of two,", "  and more.", "* `second`: an example.", "",
        "**Raises**", "", "* `ValueError`: never.", "",
        "And a line.",
    ]  # fmt: skip


def test_comments_of_fields_are_what_is_said_of_them() -> None:
    (config,) = (value for name, value in names_of(PACKAGES[1]) if name == "BuildConfig")
    assert (
        fields_of(config)["max_seq_len"] == "tokens of prompt and answer together; None: likewise"
    )
    assert fields_of(make_dataclass("Bare", ["x"])) == {"x": ""}
