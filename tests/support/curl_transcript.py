"""A transcript of curl in a page: its commands, and the shape of what they are answered."""

import json
import re
from typing import Any

from support.doc_blocks import Block


def exchanges(block: Block) -> list[tuple[str, str]]:
    """Return the commands behind `$`, each with what is shown behind it."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def has_shape(answer: str, shown: str) -> bool:
    """Whether an answer is made as the one that is shown: another model has other words.

    Lines of JSON have its fields with values of the same types, and may have more of them. Of a
    stream each kind of event counts, not how many there are of it. Other lines are equal.
    """
    found, expected = ([_shape(line) for line in t.splitlines() if line] for t in (answer, shown))
    return all(any(_holds(one, shape) for one in found) for shape in expected)


def _shape(line: str) -> Any:
    text = line.removeprefix("data: ")
    return _types(json.loads(text)) if text.startswith("{") else line


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _types(inner) for name, inner in value.items() if inner is not None}
    return [_types(inner) for inner in value] if isinstance(value, list) else type(value).__name__


def _holds(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(n in found and _holds(found[n], shape) for n, shape in expected.items())
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_holds, found, expected))
    return bool(found == expected)
