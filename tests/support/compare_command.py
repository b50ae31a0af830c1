"""The command `trt-lora compare`, and ONNX Runtime as its tables name it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import onnxruntime
from support.forked_commands import FORKED
from support.processes import without_torch

from trt_lora.scripts.trt_lora_command import main

ONNXRT = f"ONNX Runtime {onnxruntime.__version__} (CPU)"


def compare(*arguments: str | Path) -> int:
    """Run it and return the exit status."""
    try:
        with forked_processes():
            main(["compare", *(str(argument) for argument in arguments)])
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


@contextmanager
def forked_processes() -> Iterator[None]:
    """Let its processes be forks, without torch."""
    module = "trt_lora.scripts.comparison.shell_commands.subprocess"
    with patch.dict(os.environ, without_torch()), patch(module, FORKED):
        yield
