"""Random numbers that are the same in every test, and no graph of torch."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
