"""The routes in OpenAPI 3.1, their bodies from the same Structs that decode them."""

from typing import Any

import msgspec

import trt_lora
from trt_lora.runtime.server.adapters.adapter_bodies import AddBody, LoadBody, UnloadBody
from trt_lora.runtime.server.answer_shapes import OTHER_KINDS, SHAPES
from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody
from trt_lora.runtime.server.answers.tokenizing import DetokenizeBody, TokenizeBody

_GET = {
    "/health": "200 while the engine runs, else 503",
    "/ready": "200 while requests are taken",
    "/version": "the version",
    "/load": "how many requests are under way",
    "/metrics": "metrics for Prometheus",
    "/v1/models": "the base model and its adapters",
    "/v1/lora_adapters": "the adapters, and where they lie",
}
_TOKENIZER = {"/tokenizer_info": "the tokenizer's configuration"}
_POST: dict[str, Any] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_UPDATES: dict[str, Any] = {
    "/v1/load_lora_adapter": LoadBody,
    "/v1/unload_lora_adapter": UnloadBody,
    "/adapters": AddBody,
}
_STATUSES = (400, 401, 404, 408, 409, 413, 429, 500, 503)


def openapi(*, allows_updates: bool, shows_tokenizer: bool = False) -> bytes:
    """Return the document, as JSON; the routes are those that a server with these flags has."""
    gets = _GET | (_TOKENIZER if shows_tokenizer else {})
    posts = _POST | (_UPDATES if allows_updates else {})
    schemas, components = msgspec.json.schema_components(
        posts.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _operation(path, text)} for path, text in gets.items()}
    for (path, kind), schema in zip(posts.items(), schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        operation = _operation(path, (kind.__doc__ or "").strip())
        paths[path] = {"post": operation | {"requestBody": {"required": True, "content": content}}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "trt-lora", "version": trt_lora.__version__},
        "paths": paths,
        "components": {"schemas": components | {"Error": _ERROR}},
    }
    return msgspec.json.encode(document)


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": "integer"},
                    },
                },
            ]
        }
    },
}


def _operation(path: str, text: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {str(s): {"description": "refused", "content": content} for s in _STATUSES}
    answered: dict[str, Any] = {"description": text}
    if path in SHAPES:
        answered["content"] = {"application/json": {"schema": SHAPES[path]}}
    if path in OTHER_KINDS:
        answered.setdefault("content", {})[OTHER_KINDS[path]] = {"schema": {"type": "string"}}
    return {"summary": text, "responses": {"200": answered, **refusals}}
