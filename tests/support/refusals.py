"""An error that says all that it should."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def refused(kind: type[Exception], *said: str | Path) -> Iterator[None]:
    """Check that the block raises an error of a kind whose message has every one of the words."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert [str(words) for words in said if str(words) not in message] == []
