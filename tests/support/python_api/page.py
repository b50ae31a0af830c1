"""docs/python-api.md, made of docstrings.

`PYTHONPATH=tests:src python -m support.python_api.page` writes it.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from support.doc_blocks import ROOT
from support.python_api.members import fields_of, members_of, names_of, signature_of

import trt_lora.builder as builder
import trt_lora.runtime as runtime
from trt_lora.runtime.interfaces import max, trtllm, vllm
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.stats import AdapterInfo, StoreStats
from trt_lora.runtime.store.step_bindings import StepBindings

PACKAGES = (runtime, builder, max, trtllm, vllm)
OF_STORE = {"bindings": StepBindings, "lease": Lease, "info": AdapterInfo, "stats": StoreStats}
PAGE = ROOT / "docs" / "python-api.md"

_HEAD = """\
# Python API

Every public name with its docstring. Errors are those of `trt_lora.plugins.errors`.

Made by `PYTHONPATH=tests:src python -m support.python_api.page`; a test checks that it is current.
"""
_SECTION = re.compile(r"(Args|Returns|Yields|Raises):$")
_ITEM = re.compile(r"([\w, *]+): (.*)$")


def page() -> str:
    """Return the page."""
    lines = [_HEAD, *(_contents(package) for package in PACKAGES)]
    told: dict[int, str] = {}  # what is public in two packages is told once
    for package in PACKAGES:
        lines += ["", f"## `{package.__name__}`", "", *markdown(inspect.getdoc(package) or "")]
        for name, value in names_of(package):
            if id(value) in told:
                lines += ["", f"### {name}", "", f"See `{told[id(value)]}`."]
            else:
                told[id(value)] = f"{package.__name__}.{name}"
                lines += _entry(name, value)
    lines += ["", "## What an `AdapterStore` gives"]
    for member, value in OF_STORE.items():
        lines += ["", f"`AdapterStore.{member}`:", *_entry(value.__name__, value)]
    return "\n".join(lines) + "\n"


def _contents(package: ModuleType) -> str:
    return f"* `{package.__name__}`: {', '.join(f'`{name}`' for name, _ in names_of(package))}"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield from ("", f"### {name}", "")
    if not isinstance(value, type):
        yield from _told(signature_of(name, value), value)
        return
    yield from _told(_made_by(name, value), value)
    if fields := {name: comment for name, comment in fields_of(value).items() if comment}:
        yield from ("", *(f"* `{field}`: {comment}" for field, comment in fields.items()))
    if said := _said_of_arguments(value):
        yield from ("", *markdown(said))
    for member_name, member in members_of(value):
        yield from ("", f"#### {name}.{member_name}", "")
        yield from _told(signature_of(member_name, member), member)


def _made_by(name: str, cls: type) -> str:
    """How an object is made, or what the class stands on where it has no way of its own."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("trt_lora.")]
    is_protocol = getattr(cls, "_is_protocol", False)
    if not is_protocol and any("__init__" in vars(base) for base in own):
        return f"class {signature_of(name, cls)}"
    return f"class {name}({', '.join(base.__name__ for base in cls.__bases__)})"


def _told(signature: str, documented: Any) -> Iterator[str]:
    yield from ("```", signature, "```", "")
    yield from markdown(inspect.getdoc(documented) or "")


def _said_of_arguments(cls: type) -> str:
    """What is said where an object is made; of a dataclass, which errors its check raises."""
    if not dataclasses.is_dataclass(cls):
        return inspect.getdoc(vars(cls)["__init__"]) or "" if "__init__" in vars(cls) else ""
    check = inspect.getdoc(vars(cls).get("__post_init__")) or ""
    place = check.find("Raises:")
    return check[place:] if place >= 0 and "Raises:" not in (cls.__doc__ or "") else ""


def markdown(text: str) -> Iterator[str]:
    """Yield the lines of a docstring, its sections as lists."""
    section = ""
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section = found[1]
            yield from (f"**{section}**", "")
        elif not section or not line.startswith(" "):
            section = section if not line else ""
            yield line
        else:
            yield _item(line[4:]) if section in ("Args", "Raises") else line[4:]


def _item(line: str) -> str:
    """`name: meaning` as an item of a list; the lines behind it are indented."""
    found = _ITEM.match(line)
    return f"* `{found[1]}`: {found[2]}" if found and line[0] != " " else f"  {line.strip()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
