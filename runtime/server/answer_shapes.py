"""What answers with 200 hold at least, as JSON schemas by route, for OpenAPI."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def _object(**fields: Schema) -> Schema:
    """All of these fields, and maybe more."""
    return {"type": "object", "required": [*fields], "properties": fields}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_USAGE = _object(prompt_tokens=_COUNT, total_tokens=_COUNT, completion_tokens=_COUNT)
_END: Schema = {"enum": ["stop", "length"]}
_CARD = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_COUNT,
    owned_by=_TEXT,
    root=_TEXT,
    parent=_or_null("string"),
    max_model_len=_or_null("integer"),
)
_ADAPTER = _object(
    name=_TEXT,
    version=_COUNT,
    sha256=_or_null("string"),
    level={"enum": ["slot", "memory", "disk"]},
    pinned={"type": "boolean"},
    running=_COUNT,
    waiting=_COUNT,
)


def _answer(kind: str, **of_choice: Schema) -> Schema:
    choice = _object(index=_COUNT, finish_reason=_END, **of_choice)
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices=_list(choice),
        usage=_USAGE,
    )


SHAPES: Mapping[str, Schema] = {
    "/version": _object(version=_TEXT),
    "/load": _object(server_load=_COUNT),
    "/v1/models": _object(object={"const": "list"}, data=_list(_CARD)),
    "/v1/lora_adapters": _object(object={"const": "list"}, data=_list(_ADAPTER)),
    "/v1/completions": _answer("text_completion", text=_TEXT),
    "/v1/chat/completions": _answer(
        "chat.completion", message=_object(role={"const": "assistant"}, content=_TEXT)
    ),
    "/tokenize": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    "/detokenize": _object(prompt=_TEXT),
    "/v1/load_lora_adapter": _object(message=_TEXT, name=_TEXT),
    "/v1/unload_lora_adapter": _object(message=_TEXT, name=_TEXT, bytes_freed=_or_null("integer")),
    "/adapters": _object(message=_TEXT, name=_TEXT),
}
# Answers that may be, or are, something else than JSON.
OTHER_KINDS: Mapping[str, str] = {
    "/metrics": "text/plain",
    "/v1/completions": "text/event-stream",
    "/v1/chat/completions": "text/event-stream",
    "/v1/load_lora_adapter": "text/plain",
    "/v1/unload_lora_adapter": "text/plain",
    "/adapters": "text/plain",
}
