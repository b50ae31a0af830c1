"""Frameworks that spread one server over several engines, each in an environment of its own.

`make scale` runs this file; pytest does not collect it by itself, because it installs packages.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clients.letters_engine import build_letters
from clients.served import Served
from clients.serving import serving
from scaleout.build_fleet import build_fleet
from scaleout.environments import PINS, python_of
from scaleout.fleet import Fleet
from support.environments import run_module
from support.served_engines import write_adapter

from trt_lora.runtime.manifest import read_manifest

OWN = ("ray",)  # they open engines themselves


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two servers of the tiny engine that speaks bytes, which share a folder of adapters."""
    folder = tmp_path_factory.mktemp("letters")
    what = (folder / "engine", folder / "model", build_letters(folder))
    manifest = read_manifest(folder / "engine")
    for seed in range(10, 26):  # for who wants more than the servers have
        write_adapter(folder / "many" / f"n{seed}", manifest, seed=seed)
    with serving(*what) as served, serving(*what) as other:
        yield replace(served, others=(other.address,))


@pytest.fixture(scope="session")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
    readme_folder: Path,
    demo_adapters: dict[str, Path],
) -> Fleet:
    """Engines for a framework to serve."""
    real = readme_folder / "engines" / "many"
    return build_fleet(tmp_path_factory.mktemp("fleet"), real, demo_adapters)


@pytest.mark.parametrize("framework", OWN)
def test_it_serves_engines(framework: str, fleet: Fleet, tmp_path: Path) -> None:
    fleet.write(tmp_path)
    print(run_module(python_of(framework), f"scaleout.{framework}_run", tmp_path))


@pytest.mark.parametrize("framework", [name for name in PINS if name not in OWN])
def test_it_answers_as_one_engine_does(framework: str, letters: Served, tmp_path: Path) -> None:
    letters.write(tmp_path)
    print(run_module(python_of(framework), f"scaleout.{framework}_run", tmp_path))
