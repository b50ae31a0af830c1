"""The sdist is the checkout without its links; the wheel holds every package, and no benchmark."""

import email
import email.message
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from architecture.sources import (
    PACKAGE,
    PACKAGES,
    ROOT,
    checkout_files,
    data_files,
    installed,
    product_files,
)

import trt_lora

OUTSIDE = ("scripts/bench", "scripts/demo")  # what only a checkout and an sdist have
LARGEST = 1_066_000  # bytes of a wheel, of which 65,000 are the archive's own for 450 files
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools, in an sdist
BUILD_SDIST = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"


def is_outside(path: Path) -> bool:
    """Whether a file is in no wheel."""
    return path.as_posix().startswith(tuple(f"{folder}/" for folder in OUTSIDE))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy with what tools leave in a checkout beside it."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "sdist"))
    for path in checkout_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    for package in PACKAGES:
        shutil.copy(ROOT / PACKAGE / package, source / PACKAGE, follow_symlinks=False)
    for left in ("build/lib/trt_lora/x.py", "engines/x/x.py", "tests/__pycache__/x.pyc"):
        (source / left).parent.mkdir(parents=True)
        (source / left).touch()
    command = [sys.executable, "-c", BUILD_SDIST, str(folder)]
    subprocess.run(command, cwd=source, check=True, timeout=120, capture_output=True)
    (found,) = folder.glob("trt_lora-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def sdist(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist unpacked."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as pip does where no wheel is published."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(archive)]
    subprocess.run(command, check=True, timeout=120)
    (found,) = folder.glob("trt_lora-*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    """What a package index shows of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_every_folder_with_python_files_has_an_init() -> None:
    folders = {path.parent for path in product_files()}
    assert [f for f in folders if not (ROOT / f / "__init__.py").is_file()] == []


def test_the_sdist_is_the_checkout_and_holds_nothing_that_tools_left_there(sdist: Path) -> None:
    packed = {p.relative_to(sdist).as_posix() for p in sdist.rglob("*") if p.is_file()}
    packed = {name for name in packed if ".egg-info/" not in name} - MADE
    expected = ((path, installed(path)) for path in checkout_files())
    assert packed == {
        str(path if path == place else Path("src", place)) for path, place in expected
    }


def test_the_wheel_holds_every_module_and_kernel_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    shipped = [path for path in (*product_files(), *data_files()) if not is_outside(path)]
    assert packed == {str(installed(path)) for path in shipped}
    assert any(name.endswith(".cu") for name in packed)


def test_the_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert trt_lora.__version__ == project["version"]


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST


def test_the_licence_is_apache_and_lies_in_sdist_and_wheel(sdist: Path, wheel: Path) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert text.split()[:4] == b"Apache License Version 2.0,".split()
    assert (sdist / "LICENSE").read_bytes() == text
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(name) == text


def test_the_index_is_told_who_wrote_it_where_it_is_and_what_it_runs_on(
    metadata: email.message.Message,
) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The trt-lora authors"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Source", "Changelog", "Documentation"}
    assert all(url.startswith(urls["Source"]) for url in urls.values())
    pythons = {
        line.rpartition(" ")[2]
        for line in metadata.get_all("Classifier", [])
        if line.startswith("Programming Language")
    }
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}
    assert metadata["Requires-Python"] == ">=3.11"
