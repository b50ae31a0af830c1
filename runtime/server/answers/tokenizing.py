"""Tokenize and detokenize text, by the model's own tokenizer."""

from typing import Any

import msgspec

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.errors import HttpError


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # of a text by default, of a conversation not
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def tokenized(tokenizer: TextTokenizer, manifest: Manifest, body: TokenizeBody) -> dict[str, Any]:
    """Return the tokens of a text or a conversation, as vLLM does.

    Raises:
        HttpError: 400; there is neither, or the template refuses the conversation.
    """
    try:
        if body.messages is not None:
            chat = Chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs or {},
            )
            ids = tokenizer.encode(chat)
        elif body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = tokenizer.encode_text(body.prompt, special_tokens=special)
        else:
            raise HttpError(400, "there is no prompt, and there are no messages", "prompt")
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
