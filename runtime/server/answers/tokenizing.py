"""Tokenize and detokenize text, by the model's own tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.generation.text.chat_template import CONFIG_FILE, TEMPLATE_FILE, Chat
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.answers.encoding import encoded_text
from trt_lora.runtime.server.errors import HttpError

# Of a tokenizer's configuration what tells where its files lie.
_PLACES = frozenset(("vocab_file", "merges_file", "tokenizer_file", "name_or_path"))


class Function(msgspec.Struct):
    """What a template tells the model of a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | msgspec.UnsetType = msgspec.UNSET


class Tool(msgspec.Struct, kw_only=True):
    """A tool, as OpenAI's chats have it; it is written into the prompt, and never called."""

    type: Literal["function"] = "function"
    function: Function


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # of a text by default, of a conversation not
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Any = None  # refused
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def tokenized(tokenizer: TextTokenizer, manifest: Manifest, body: TokenizeBody) -> dict[str, Any]:
    """Return the tokens of a text or a conversation, as vLLM does.

    Raises:
        HttpError: 400; there is neither, a template is given, or the model's refuses the
            conversation.
    """
    if body.chat_template is not None:
        text = "chat_template is not supported: only the model's own is run"
        raise HttpError(400, text, "chat_template")
    try:
        given = _conversation(body) if body.prompt is None else body.prompt
        ids = encoded_text(tokenizer, given, special_tokens=body.add_special_tokens).ids
    except ConfigError as error:
        raise HttpError(400, str(error)) from error
    return {
        "count": len(ids),
        "max_model_len": manifest.max_seq_len,
        "tokens": ids,
        "token_strs": tokenizer.names(ids) if body.return_token_strs else None,
    }


def detokenized(
    tokenizer: TextTokenizer, manifest: Manifest, body: DetokenizeBody
) -> dict[str, str]:
    """Return the text of tokens.

    Raises:
        HttpError: 400; one is none of the model's.
    """
    try:
        ids = token_ids("tokens", body.tokens, manifest.vocabulary_size)
    except ConfigError as error:
        raise HttpError(400, str(error), "tokens") from error
    return {"prompt": tokenizer.decode(list(ids), skip_special_tokens=False)}


def tokenizer_info(directory: Path) -> dict[str, Any]:
    """Return a tokenizer's configuration, as vLLM does, without the places of its files.

    Raises:
        AdapterError: its file is no JSON.
    """
    config, template = directory / CONFIG_FILE, directory / TEMPLATE_FILE
    found = read_json(config) if config.is_file() else {}
    if template.is_file():
        found["chat_template"] = template.read_text("utf-8")
    found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    return {name: _plain(value) for name, value in found.items() if name not in _PLACES}


def _plain(value: Any) -> Any:
    """A special token as its text, wherever it is."""
    if isinstance(value, Mapping):
        return value.get("content") or {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _conversation(body: TokenizeBody) -> Chat:
    if body.messages is None:
        raise HttpError(400, "there is no prompt, and there are no messages", "prompt")
    tools = {} if body.tools is None else {"tools": msgspec.to_builtins(body.tools)}
    return Chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs={**(body.chat_template_kwargs or {}), **tools},
    )
