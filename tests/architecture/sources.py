"""The files of the checkout: what it holds, less what tools leave in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("builder", "plugins", "runtime", "scripts")
PACKAGE = "src/trt_lora"  # whose subpackages are links to the folders above
OWN = (f"{PACKAGE}/__init__.py", f"{PACKAGE}/__main__.py")
TYPED = f"{PACKAGE}/py.typed"


def files(*patterns: str) -> list[Path]:
    """Return the files that match, relative to the checkout; `**` is any number of folders."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts)


def product_files() -> list[Path]:
    """Return the Python files of the product."""
    return files(*OWN, *(f"{package}/**/*.py" for package in PACKAGES))


def data_files() -> list[Path]:
    """Return what the wheel holds beside Python: kernels, texts, a page, the mark of types."""
    endings = ("cu", "cuh", "jinja", "csv", "txt", "html", "css", "js", "svg", "pbtxt")
    kinds = [f"**/*.{ending}" for ending in endings]
    return files(TYPED, *(f"{package}/{kind}" for package in PACKAGES for kind in kinds))


def checkout_files() -> list[Path]:
    """Return every file that belongs to the project, tests and documents included."""
    top = (*OWN, TYPED, "*.md", "*.toml", "*.y*ml", "LICENSE", "MANIFEST.in", "*file")
    hidden = (".gitignore", ".dockerignore", ".ci/run", "engines/README.md", "engines/.gitignore")
    folders = (*PACKAGES, "docs", "examples", "integrations", "tests")
    return files(*top, *hidden, *(f"{folder}/**/*" for folder in folders))


def installed(path: Path) -> Path:
    """Return where a file of the product lies below `src`, and in a wheel; others stay."""
    if path.parts[0] in PACKAGES:
        return Path("trt_lora", path)
    return path.relative_to("src") if path.parts[0] == "src" else path
