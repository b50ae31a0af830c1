"""Suppress log output of torch and transformers during a build."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as _untyped

_transformers: Any = _untyped


@contextmanager
def suppress_output() -> Iterator[None]:
    """Hold back warnings, log lines and progress bars inside the block; errors still raise."""
    torch_logger = logging.getLogger("torch.onnx")
    torch_level, verbosity = torch_logger.level, _transformers.get_verbosity()
    bars = _transformers.is_progress_bar_enabled()
    torch_logger.setLevel(logging.ERROR)
    _transformers.set_verbosity_error()
    _transformers.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_logger.setLevel(torch_level)
        _transformers.set_verbosity(verbosity)
        if bars:
            _transformers.enable_progress_bar()
