"""An engine that runs its ONNX file of standard operators, not the one made for ONNX Runtime."""

import shutil
from pathlib import Path

from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_CPU_FILE


def standard_engine(engine: Path, directory: Path) -> Path:
    """Copy an engine, whose manifest knows the other file by no name that is run."""
    shutil.copytree(engine, directory)
    (directory / ONNX_CPU_FILE).rename(directory / "none")
    text = (directory / MANIFEST_FILE).read_text().replace(ONNX_CPU_FILE, "none")
    (directory / MANIFEST_FILE).write_text(text)
    return directory
