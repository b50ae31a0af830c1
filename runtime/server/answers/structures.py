"""What an answer has to be, as bodies ask for it: OpenAI's `response_format`, and vLLM's way."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.server.errors import HttpError

_ANY_OBJECT = {"type": "object"}


class ResponseFormat(msgspec.Struct):
    """OpenAI's way to ask for JSON."""

    type: str
    json_schema: Mapping[str, Any] | None = None


def structure(
    response_format: ResponseFormat | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return what an answer has to be; None is any text.

    Raises:
        HttpError: 400; it is none of what is known, or several at once.
    """
    wanted = dict(structured_outputs or {})
    if wanted.pop("json_object", None):
        wanted["json"] = _ANY_OBJECT
    if response_format is not None and response_format.type != "text":
        wanted["json"] = _schema(response_format)
    wanted = {name: value for name, value in wanted.items() if value not in (None, False)}
    if (choices := wanted.pop("choice", None)) is not None:
        wanted["grammar"] = _choice(choices)
    if not wanted:
        return None
    if unknown := wanted.keys() - {"json", "regex", "grammar"}:
        raise HttpError(
            400,
            f"structured_outputs has {sorted(unknown)}, expected json, json_object, regex, choice "
            "or grammar",
            "structured_outputs",
        )
    try:
        return StructuredOutputsParams(**wanted)
    except ConfigError as error:
        raise HttpError(400, str(error), "structured_outputs") from error


def _schema(wanted: ResponseFormat) -> object:
    if wanted.type == "json_object":
        return _ANY_OBJECT
    schema = (wanted.json_schema or {}).get("schema")
    if wanted.type != "json_schema" or schema is None:
        raise HttpError(
            400,
            f"response_format is {wanted.type!r}, expected text, json_object or json_schema",
            "response_format",
        )
    return schema


def _choice(choices: object) -> str:
    """The grammar of one of some texts."""
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise HttpError(
            400,
            f"structured_outputs has choice {choices!r:.80}, expected a list of strings",
            "structured_outputs",
        )
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"
