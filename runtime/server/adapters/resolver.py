"""Resolver: what finds an adapter by a name that nobody has loaded."""

from pathlib import Path
from typing import Protocol


class Resolver(Protocol):
    """A place of adapters; it is asked when a request names one for the first time.

    Names come from requests: they are checked as `check_served_name` does, and no further.
    """

    async def resolve(self, base: str, name: str) -> Path | None:
        """Return where an adapter lies; None where this place has none of that name.

        Args:
            base: the base model's name.
            name: that a request asks for. A wrong one must cost next to nothing.

        Raises:
            BackendError: the place cannot be asked now.
        """
        ...

    async def close(self) -> None:
        """End what it does in the background."""
        ...
