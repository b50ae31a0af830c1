"""Message helpers: shortened values, and lists cut after a few items."""

import reprlib
from collections.abc import Sequence

_SHOWN = 3  # items of a list

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 4, 20, 20, 200


def shown(value: object) -> str:
    """Return a value of a file for a message, shortened where it is long."""
    return _SHORT.repr(value)


def listed(items: Sequence[str], separator: str = ", ", last: str = " and ") -> str:
    """Return the first few items, and how many more there are behind `last`."""
    more = f"{last}{len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more
