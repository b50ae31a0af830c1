"""Prompts of a body as token ids, and as the text that an answer may repeat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.prompts import prompt_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.answers.bodies import AnswerBody, ChatBody, CompletionBody
from trt_lora.runtime.server.errors import HttpError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine reads it."""

    ids: list[int]
    text: str | None = None  # of a conversation what the template writes; None: it was token ids


def encoded(
    tokenizer: TextTokenizer, manifest: Manifest, body: CompletionBody | ChatBody
) -> list[EncodedPrompt]:
    """Return the prompts of a body.

    Raises:
        HttpError: 400; one is empty or too long, or no prompt of this model.
    """
    special = body.add_special_tokens
    most, found = _kept(body, manifest.max_seq_len), list[EncodedPrompt]()
    try:
        for number, prompt in enumerate(body.prompts()):
            if isinstance(prompt, str | Chat):
                whole = encoded_text(tokenizer, prompt, special_tokens=special)
            else:
                whole = EncodedPrompt(list(cast("Sequence[int]", prompt)))
            values = whole.ids
            if most is not None:
                values = values[:most] if body.truncation_side == "right" else values[-most:]
            ids = prompt_ids(f"prompt {number}", values, tokenizer, manifest)
            found.append(EncodedPrompt(ids, whole.text))
    except ConfigError as error:
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        raise HttpError(400, str(error), field) from error
    return found


def encoded_text(
    tokenizer: TextTokenizer, prompt: str | Chat, *, special_tokens: bool | None
) -> EncodedPrompt:
    """Return the tokens of a text or a conversation, however many they are.

    Args:
        tokenizer: of the model.
        prompt: the text, or the conversation.
        special_tokens: add those with which a prompt begins. None: to a text alone, because a
            template writes them itself.

    Raises:
        ConfigError: the model's template refuses the conversation.
    """
    text = tokenizer.render(prompt) if isinstance(prompt, Chat) else prompt
    special = isinstance(prompt, str) if special_tokens is None else special_tokens
    return EncodedPrompt(tokenizer.encode_text(text, special_tokens=special), text)


def _kept(body: AnswerBody, room: int) -> int | None:
    """How many tokens of a prompt are kept; None: all of them."""
    most = body.truncate_prompt_tokens
    if most is not None and most > room:
        text = f"truncate_prompt_tokens is {most}, expected {room} at most, which the engine takes"
        raise HttpError(400, text, "truncate_prompt_tokens")
    return room - 1 if most == -1 else most  # the answer has a token at least
