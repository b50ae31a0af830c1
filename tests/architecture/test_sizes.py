"""No folder above 16 files, no file above 400 lines."""

from collections import Counter
from pathlib import Path

import pytest
from architecture.sources import ROOT, files, product_files

MOST_FILES, MOST_LINES = 16, 400


def lines(path: Path) -> int:
    """Lines of a file of the checkout."""
    return len((ROOT / path).read_text().splitlines())


def test_no_folder_of_the_product_has_too_many_files() -> None:
    paths = [path for path in product_files() if path.name != "__init__.py"]
    counts = Counter(path.parent for path in paths)
    assert {str(f): n for f, n in counts.items() if n > MOST_FILES} == {}


@pytest.mark.parametrize(
    "paths",
    [product_files(), files("integrations/**/*.py"), files("tests/**/*.py")],
    ids=["product", "integrations", "tests"],
)
def test_no_file_is_too_long(paths: list[Path]) -> None:
    assert paths
    assert {str(path): lines(path) for path in paths if lines(path) > MOST_LINES} == {}
