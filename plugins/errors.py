"""Exceptions of trt-lora: one root, and a built-in family for each.

A message says what is wrong, the value, the choices, and the next step. A command prints it and
exits with 2; only a defect of the package shows a traceback.
"""

from collections.abc import Hashable, Sequence


class LoRAError(Exception):
    """Root of every error that is the input's fault and not the package's."""

    def __str__(self) -> str:
        """Return the message; `KeyError` would quote it.

        Halves of surrogate pairs, as names of files can have, are escaped: no stream takes them.
        """
        message = str(self.args[0]) if self.args else ""
        return message.encode(errors="backslashreplace").decode()


class ConfigError(LoRAError, ValueError):
    """An option has a value that cannot be used."""


class ModelError(LoRAError, ValueError):
    """The base model cannot be exported, or its graph cannot be compiled."""


class ManifestError(LoRAError, ValueError):
    """An engine directory is missing, incomplete, or of another schema."""


class AdapterError(LoRAError, ValueError):
    """An adapter cannot be read, asks for what is not supported, or does not fit the engine."""


class ChangedAdapterError(AdapterError):
    """The files of an adapter are not what they were when it was given its name."""


class TensorError(LoRAError, ValueError):
    """A tensor has a wrong shape, dtype, device or layout."""


class UnknownAdapterError(LoRAError, KeyError):
    """No adapter of that name is loaded."""


class EvictedAdapterError(UnknownAdapterError):
    """An adapter whose weights came in memory had to leave; they must be sent again."""


class UnknownBindingError(LoRAError, KeyError):
    """The active adapter has no weight for that binding."""


class BackendError(LoRAError, RuntimeError):
    """An engine cannot be run, or built, by the backend asked for."""


class OutputError(LoRAError, ArithmeticError):
    """An engine's answer is no number: the weights at hand leave its number range."""

    def __init__(self, message: str, rows: Sequence[Hashable] = ()) -> None:
        """Keep the sequences of a batch that it belongs to, by number."""
        super().__init__(message)
        self.rows = tuple(rows)


class StateError(LoRAError, RuntimeError):
    """A call came before the one it depends on."""
