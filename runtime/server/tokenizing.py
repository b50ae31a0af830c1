"""Tokenize and detokenize text, by the model's own tokenizer."""

from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.server.bodies import DetokenizeBody, TokenizeBody
from trt_lora.runtime.server.errors import HttpError


def tokenized(engine: Engine, body: TokenizeBody) -> dict[str, Any]:
    """Return the tokens of a text or a conversation, as vLLM does.

    Raises:
        HttpError: 400; there is neither, or the template refuses the conversation.
    """
    tokenizer = engine.tokenizer
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
            ids = tokenizer.encode_text(body.prompt, special_tokens=body.add_special_tokens)
        else:
            raise HttpError(400, "there is no prompt, and there are no messages", "prompt")
    except ConfigError as error:
        raise HttpError(400, str(error)) from error
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return {
        "count": len(ids),
        "max_model_len": engine.manifest.max_seq_len,
        "tokens": ids,
        "token_strs": texts if body.return_token_strs else None,
    }


def detokenized(engine: Engine, body: DetokenizeBody) -> dict[str, str]:
    """Return the text of tokens.

    Raises:
        HttpError: 400; one is none of the model's.
    """
    try:
        ids = token_ids("tokens", body.tokens, engine.manifest.vocabulary_size)
    except ConfigError as error:
        raise HttpError(400, str(error), "tokens") from error
    return {"prompt": engine.tokenizer.decode(list(ids), skip_special_tokens=False)}
