"""Quantisation libraries, each in an environment of its own, read the fixtures and make others.

`make formats` runs this file; pytest does not collect it by itself, because it installs packages.
"""

from pathlib import Path

import pytest
from formats.environments import PINS, python_of
from support.environments import run_module


@pytest.mark.parametrize("library", PINS)
def test_weights_are_those_that_it_makes_of_the_codes(library: str, tmp_path: Path) -> None:
    print(run_module(python_of(library), f"formats.{library}_library", tmp_path))
