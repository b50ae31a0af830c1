"""Clients that nobody here wrote, each in an environment of its own, ask `trt-lora serve`.

`make clients` runs this file; pytest does not collect it by itself, because it installs packages.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clients.environments import PINS, python_of
from clients.letters_engine import build_letters
from clients.served import Served
from clients.serving import serving
from support.environments import run_module

REAL = ("aiperf", "lm_eval")  # they measure and compare the demo's model


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two servers of the tiny engine that speaks bytes."""
    folder = tmp_path_factory.mktemp("letters")
    what = (folder / "engine", folder / "model", build_letters(folder))
    with serving(*what) as served, serving(*what) as other:
        yield replace(served, others=(other.address,))


@pytest.fixture(scope="session")
def smollm2(readme_folder: Path, demo_adapters: dict[str, Path]) -> Iterator[Served]:
    """A server of the real model's engine with a slot for each of the trained adapters."""
    engine, model = readme_folder / "engines" / "many", readme_folder / "build" / "smollm2"
    with serving(engine, model, demo_adapters) as served:
        yield served


@pytest.mark.parametrize("client", REAL)
def test_a_client_measures_as_it_expects(client: str, smollm2: Served, tmp_path: Path) -> None:
    run(client, smollm2, tmp_path)


@pytest.mark.parametrize("client", [name for name in PINS if name not in REAL])
def test_a_client_is_answered_as_it_expects(client: str, letters: Served, tmp_path: Path) -> None:
    run(client, letters, tmp_path)


def run(client: str, served: Served, folder: Path) -> None:
    """Run the file of a client in its environment; it fails where its answers are wrong."""
    served.write(folder)
    print(run_module(python_of(client), f"clients.{client}_client", folder))
