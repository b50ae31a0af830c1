"""Tokenizer and chat template of an engine directory.

The only file that imports tokenizers.
"""

from collections.abc import Sequence
from pathlib import Path

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.generation.text.chat_template import Message, read_chat_template

TOKENIZER_FILE = "tokenizer.json"


class TextTokenizer:
    """The tokenizer and the chat template of an engine."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.json`, and the chat template if there is one.

        Raises:
            BackendError: tokenizers or jinja2 is not installed.
            ConfigError: the engine has no tokenizer, or a damaged one.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise BackendError(f"{error}; pip install 'trt-lora[text]'") from error
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no {TOKENIZER_FILE}; pass prompts as lists of token ids, "
                "or build from a model directory that has a fast tokenizer"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {error}; build the engine again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._template = read_chat_template(directory)

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt.

        A string is one message of a user if the model has a chat template, else plain text.

        Raises:
            ConfigError: messages are given but the model has no template, or it refuses them; the
                text holds half a character.
        """
        if self._template is None and isinstance(prompt, str):
            return list(self._tokenizer.encode(_whole(prompt)).ids)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = _whole(self.render(messages))
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, ready for the assistant's answer.

        Raises:
            ConfigError: the model has no chat template, or it refuses the conversation.
        """
        if self._template is None:
            raise ConfigError("this model has no chat template; pass the prompt as a string")
        return self._template.render(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _whole(text: str) -> str:
    """Return the text if it is Unicode; a string of Python may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text of a prompt has {text[error.start]!r} at character {error.start}, a lone "
            "surrogate and no character; where it was read, decode it with errors='replace'"
        ) from error
    return text
