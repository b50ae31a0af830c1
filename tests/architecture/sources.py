"""The files of the checkout: what it holds, less what tools leave in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("builder", "plugins", "runtime", "scripts")
OWN = ("__init__.py", "__main__.py")  # of the package `trt_lora` itself, which is the checkout


def files(*patterns: str) -> list[Path]:
    """Return the files that match, relative to the checkout; `**` is any number of folders."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts)


def product_files() -> list[Path]:
    """Return the Python files of the product."""
    return files(*OWN, *(f"{package}/**/*.py" for package in PACKAGES))


def data_files() -> list[Path]:
    """Return what the wheel holds beside Python: kernel sources, templates, the mark of types."""
    kinds = ("**/*.cu", "**/*.cuh", "**/*.jinja")
    return files("py.typed", *(f"{package}/{kind}" for package in PACKAGES for kind in kinds))


def checkout_files() -> list[Path]:
    """Return every file that belongs to the project, tests and documents included."""
    top = ("*.py", "*.md", "*.toml", "*.y*ml", "py.typed", "LICENSE", "MANIFEST.in", "*file")
    hidden = (".gitignore", ".dockerignore", ".ci/run", "engines/README.md", "engines/.gitignore")
    folders = (*PACKAGES, "docs", "examples", "tests")
    return files(*top, *hidden, *(f"{folder}/**/*" for folder in folders))
