"""The command `trt-lora compare`, and ONNX Runtime as its tables name it."""

import os
from pathlib import Path
from unittest.mock import patch

import onnxruntime
from support.processes import without_torch

from trt_lora.scripts.trt_lora_command import main

ONNXRT = f"ONNX Runtime {onnxruntime.__version__} (CPU)"


def compare(*arguments: str | Path) -> int:
    """Run it and return the exit status; its processes have no torch."""
    try:
        with patch.dict(os.environ, without_torch()):
            main(["compare", *(str(argument) for argument in arguments)])
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0
