"""Errors that transformers raises, which are of every kind, as one line of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from trt_lora.plugins.errors import LoRAError, ModelError


@contextmanager
def one_line(what: str, next_step: str) -> Iterator[None]:
    """Turn any error of the block but our own into a ModelError: what, why, and the next step."""
    try:
        yield
    except (LoRAError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{what}: {reason:.500}; {next_step}") from error
