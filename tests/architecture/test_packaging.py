"""The wheel holds every package and kernel source, and neither benchmark nor demo."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from architecture.sources import ROOT, data_files, files, product_files

import trt_lora

OUTSIDE = ("scripts/bench", "scripts/demo")  # what only a checkout has
LARGEST = 550_000  # bytes of a wheel


def is_outside(path: Path) -> bool:
    """Whether a file is only in a checkout."""
    return path.as_posix().startswith(tuple(f"{folder}/" for folder in OUTSIDE))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build folder in the checkout would be packed too."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    for path in (*product_files(), *data_files(), *files("pyproject.toml", "README.md")):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=120)
    (found,) = folder.glob("trt_lora-*.whl")
    return found


def test_the_listed_packages_are_the_folders_with_an_init() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in product_files() if path.name == "__init__.py"}
    expected = {".".join(("trt_lora", *f.parts)) for f in folders if not is_outside(f / "x")}
    assert sorted(settings["packages"]) == sorted(expected)


def test_every_folder_with_python_files_has_an_init() -> None:
    folders = {path.parent for path in product_files()}
    assert [f for f in folders if not (ROOT / f / "__init__.py").is_file()] == []


def test_the_wheel_holds_every_module_and_kernel_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    shipped = [path for path in (*product_files(), *data_files()) if not is_outside(path)]
    assert packed == {f"trt_lora/{path.as_posix()}" for path in shipped}
    assert any(name.endswith(".cu") for name in packed)


def test_the_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert trt_lora.__version__ == project["version"]


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST
