"""Prompts of a body as token ids, and as the text that an answer may repeat."""

from dataclasses import dataclass
from typing import cast

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.prompts import Prompt, prompt_ids
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
    is_chat = isinstance(body, ChatBody)
    special = body.add_special_tokens
    special = not is_chat if special is None else special  # a template writes them itself
    most, found = _kept(body, manifest.max_seq_len), list[EncodedPrompt]()
    try:
        for number, prompt in enumerate(body.prompts()):
            text = tokenizer.render(prompt) if isinstance(prompt, Chat) else prompt
            values: Prompt = text
            if isinstance(text, str):
                values = tokenizer.encode_text(text, special_tokens=special)
            if most is not None:
                ids = cast("list[int]", values)
                values = ids[:most] if body.truncation_side == "right" else ids[-most:]
            ids = prompt_ids(f"prompt {number}", values, tokenizer, manifest)
            found.append(EncodedPrompt(ids, text if isinstance(text, str) else None))
    except ConfigError as error:
        raise HttpError(400, str(error), "messages" if is_chat else "prompt") from error
    return found


def _kept(body: AnswerBody, room: int) -> int | None:
    """How many tokens of a prompt are kept; None: all of them."""
    most = body.truncate_prompt_tokens
    if most is not None and most > room:
        text = f"truncate_prompt_tokens is {most}, expected {room} at most, which the engine takes"
        raise HttpError(400, text, "truncate_prompt_tokens")
    return room - 1 if most == -1 else most  # the answer has a token at least
