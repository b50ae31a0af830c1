"""Errors of models: on one line, in our words, whoever raised them."""

from collections.abc import Iterator
from contextlib import contextmanager

from trt_lora.plugins.errors import LoRAError, ModelError

_DENSE = "pass a dense decoder-only model; docs/supported-models.md lists them"


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


def unsupported(model: str, reason: str) -> ModelError:
    """Return the error of a model that cannot be an engine, on one line."""
    return ModelError(f"{model} cannot be built: {reason}; {_DENSE}")
