"""A row of the table of documented members: what a document promises, and what there is of it."""

from dataclasses import dataclass
from typing import Literal

State = Literal["present", "different"]


@dataclass(frozen=True)
class Row:
    """A documented member: nothing is without a counterpart, so there is no third state."""

    documented: str
    state: State
    ours: str  # path below trt_lora, or a command and its option
    reason: str  # why it is not as documented, or what to know
    test: str  # file below tests/ and function


@dataclass(frozen=True)
class Document:
    """A documented interface and its members, in the document's order."""

    title: str
    rows: tuple[Row, ...]


def present(documented: str, ours: str, test: str, note: str = "") -> Row:
    """Return a member that does what the document says."""
    return Row(documented, "present", ours, note, test)


def different(documented: str, ours: str, test: str, reason: str) -> Row:
    """Return a member whose need is met in another way."""
    return Row(documented, "different", ours, reason, test)
