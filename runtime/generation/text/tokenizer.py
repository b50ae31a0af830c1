"""Tokenizer and chat template of an engine directory.

The only file that imports tokenizers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.generation.text.chat_template import (
    Message,
    check_characters,
    read_chat_template,
)
from trt_lora.runtime.generation.text.structured import Grammars

TOKENIZER_FILE = "tokenizer.json"
_A_PROMPT = "the text of a prompt"


class TextTokenizer:
    """The tokenizer and the chat template of an engine."""

    @checked
    def __init__(self, directory: str | Path) -> None:
        """Read `tokenizer.json`, and the chat template if there is one.

        Raises:
            BackendError: tokenizers or jinja2 is not installed.
            ConfigError: the engine has no tokenizer, or a damaged one.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise BackendError(f"{error}; pip install 'trt-lora[text]'") from error
        directory = Path(directory)
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
        self._grammars: dict[tuple[int, tuple[int, ...]], Grammars] = {}

    @checked
    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt.

        A string is one message of a user if the model has a chat template, else plain text.

        Raises:
            ConfigError: messages are given but the model has no template, or it refuses them; the
                text holds half a character.
        """
        if isinstance(prompt, str):
            if self._template is None:
                return self.encode_text(prompt)
            check_characters(prompt, _A_PROMPT)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # The template writes the special tokens itself.
        return self.encode_text(self.render(messages), special_tokens=False)

    @checked
    def encode_text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text as it is, without a chat template.

        Args:
            text: of any length.
            special_tokens: put those around it that the tokenizer puts around a text.

        Raises:
            ConfigError: the text holds half a character.
        """
        check_characters(text, _A_PROMPT)
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    @checked
    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, ready for the assistant's answer.

        Raises:
            ConfigError: the model has no chat template, or it refuses the conversation.
        """
        if self._template is None:
            raise ConfigError("this model has no chat template; pass the prompt as a string")
        return self._template.render(messages)

    @checked
    def stream(self, *, skip_special_tokens: bool = True) -> "TextStream":
        """Return what turns the tokens of one answer into text as they come."""
        from tokenizers.decoders import DecodeStream

        skip = skip_special_tokens
        step = partial(DecodeStream(skip_special_tokens=skip).step, self._tokenizer)
        return TextStream(step, partial(self.decode, skip_special_tokens=skip))

    @checked
    def grammars(self, vocabulary: int, stop_token_ids: tuple[int, ...]) -> Grammars:
        """Return what makes constraints over these tokens; made once, which may take a second.

        Args:
            vocabulary: the width of the logits.
            stop_token_ids: that end an answer.

        Raises:
            BackendError, ConfigError: as `Grammars`.
        """
        key = (vocabulary, stop_token_ids)
        if key not in self._grammars:
            self._grammars[key] = Grammars(self._tokenizer.to_str(), *key)
        return self._grammars[key]

    @checked
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


class TextStream:
    """Text of tokens as they come; bytes that are no whole character yet are held back."""

    def __init__(
        self, step: Callable[[int], str | None], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._step, self._decode = step, decode
        self._ids: list[int] = []
        self._length = 0  # characters returned

    def add(self, token_id: int) -> str:
        """Return the text that a token completes."""
        self._ids.append(token_id)
        text = self._step(token_id) or ""
        self._length += len(text)
        return text

    def end(self) -> str:
        """Return what was held back: half a character at the end reads as one that is damaged."""
        return self._decode(self._ids)[self._length :]
