"""LogConfig and its lines: the log of a server on standard error, as text or as JSON."""

import json
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trt_lora.plugins.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
_FACTS = "facts"  # of a log record
_PLAIN = re.compile(r"[\w./:@+~-]+", re.ASCII)  # a value that needs no quotes


class _Lines(logging.Formatter):
    """`2026-11-25T10:08:18.123Z INFO trt_lora.x: message name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback of a defect below it."""
        facts = "".join(f" {name}={_text(value)}" for name, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{facts}"
        trace = self._trace(record)
        return f"{line}\n{trace}" if trace else line

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class _JsonLines(_Lines):
    """An object a line: time, level, logger, message, exception, and the facts by their names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := self._trace(record):
            told["exception"] = trace
        return json.dumps(told | dict(_facts(record)), default=str)


_FORMATS: Mapping[str, type[_Lines]] = {"text": _Lines, "json": _JsonLines}
FORMATS = tuple(_FORMATS)


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how."""

    log_format: str = "text"  # or "json", an object a line
    log_level: str = "info"  # of this package; of others it is "warning"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is none of the choices.
        """
        for name, choices in (("log_format", FORMATS), ("log_level", LEVELS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {choices}")

    def set_up(self) -> None:
        """Let the process log so, and no other way; an application calls it, once."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_FORMATS[self.log_format]())
        logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
        ours = logging.getLogger("trt_lora")
        ours.handlers.clear()  # a command shows each warning once, and not when
        ours.setLevel(self.log_level.upper())


def with_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `extra` of a call that logs is, so that its line has the facts."""
    return {_FACTS: facts}


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, _FACTS, {})


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    """A value that cannot end its line, and whose end is seen."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
