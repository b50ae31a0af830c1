"""Message helpers: shortened values, lists cut after a few items, the name that was meant."""

import difflib
import reprlib
from collections.abc import Iterable, Sequence

_SHOWN = 3  # items of a list
_NEAR = 0.75  # of the letters: two of four that change places; --model-config is no --config

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 4, 20, 20, 200


def shown(value: object) -> str:
    """Return a value of a file for a message, shortened where it is long."""
    return _SHORT.repr(value)


def listed(items: Sequence[str], separator: str = ", ", last: str = " and ") -> str:
    """Return the first few items, and how many more there are behind `last`."""
    more = f"{last}{len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` of the choice that is spelled most alike; empty if none is."""
    near = difflib.get_close_matches(name, list(choices), 1, _NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""
