"""What tests make of the sources once, below `build/`, for all processes and for later runs."""

import hashlib
import shutil
from functools import cache
from pathlib import Path

from support.doc_blocks import ROOT

from trt_lora.plugins.extras import installed_versions

TOOLS = ("torch", "transformers", "onnx-ir", "onnxscript", "tensorrt-rtx-cu13")


@cache
def build_cache(kind: str, more: str = "") -> Path:
    """Return the folder of these sources, these tools and `more`; delete those of others."""
    digest = hashlib.sha256(f"{more} {installed_versions(TOOLS)}".encode())
    for folder in ("builder", "plugins", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    found = ROOT / "build" / kind / digest.hexdigest()[:16]
    found.mkdir(parents=True, exist_ok=True)
    for other in found.parent.iterdir():
        if other != found:
            shutil.rmtree(other, ignore_errors=True)
    return found
