"""Model errors on one line, from exceptions of torch and transformers."""

from collections.abc import Iterator
from contextlib import contextmanager

from trt_lora.plugins.errors import LoRAError, ModelError

_DENSE = "pass a decoder-only model; docs/supported-models.md lists them"


@contextmanager
def one_line(
    failure: str,
    next_step: str,
    *,
    only: type[Exception] = Exception,
    show_root_cause: bool = False,
    most_characters: int = 500,
) -> Iterator[None]:
    """Turn errors of the block, other than our own, into a ModelError on one line.

    Args:
        failure: what cannot be done, to what.
        next_step: for the user.
        only: errors of other classes pass.
        show_root_cause: give the error that caused the others, not the last.
        most_characters: of the reason.
    """
    try:
        yield
    except (LoRAError, MemoryError):
        raise
    except only as error:
        shown = _root_cause(error) if show_root_cause else error
        reason = " ".join(f"{type(shown).__name__}: {shown}".split())
        raise ModelError(f"{failure}: {reason[:most_characters]}; {next_step}") from error


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def unsupported(model: str, reason: str) -> ModelError:
    """Return the error of a model that cannot be an engine, on one line."""
    return ModelError(f"{model} cannot be built: {reason}; {_DENSE}")
