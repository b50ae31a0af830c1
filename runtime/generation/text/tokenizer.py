"""Tokenizer and chat template of an engine directory.

The only file that imports tokenizers.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.generation.text.answer_text import TextStream
from trt_lora.runtime.generation.text.chat_template import (
    Chat,
    Message,
    check_characters,
    read_chat_template,
)
from trt_lora.runtime.generation.text.structured import Grammars

TOKENIZER_FILE = "tokenizer.json"
_A_PROMPT = "the text of a prompt"
_SHORT = 4096  # characters; `encode` keeps all other threads of Python waiting, `encode_batch` none


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
        self._grammars: Grammars | None = None

    @checked
    def encode(self, prompt: str | Sequence[Message] | Chat) -> list[int]:
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
            prompt = [{"role": "user", "content": prompt}]
        # The template writes the special tokens itself.
        return self.encode_text(self.render(prompt), special_tokens=False)

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
        if len(text) <= _SHORT:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=special_tokens)
        return list(found.ids)

    @checked
    def render(self, chat: Sequence[Message] | Chat) -> str:
        """Return the text of a conversation; of messages, ready for the assistant's answer.

        Raises:
            ConfigError: the model has no chat template, or it refuses the conversation.
        """
        if self._template is None:
            raise ConfigError("this model has no chat template; pass the prompt as a string")
        return self._template.render(chat if isinstance(chat, Chat) else Chat(chat))

    @checked
    def stream(
        self,
        before: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """Return what turns the tokens of one answer into text as they come.

        Args:
            before: the tokens of its prompt: whether a space comes first depends on them.
            skip_special_tokens: leave them out.
            spaces_between_special_tokens: put none between two of them, where it is False.
        """
        joined: Mapping[int, str] = {}
        if not (skip_special_tokens or spaces_between_special_tokens):
            added = self._tokenizer.get_added_tokens_decoder()
            joined = {number: token.content for number, token in added.items()}
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return TextStream(decode, before, joined)

    @checked
    def grammars(self, vocabulary: int, stop: int) -> Grammars:
        """Return what makes constraints over these tokens; the first time, that takes a second.

        Raises:
            BackendError, ConfigError: as `Grammars`, whose arguments these are.
        """
        if self._grammars is None or self._grammars.key != (vocabulary, stop):
            self._grammars = Grammars(self._tokenizer.to_str(), vocabulary, stop)
        return self._grammars

    @checked
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @checked
    def names(self, ids: Sequence[int]) -> list[str | None]:
        """Return what the vocabulary calls tokens; None where it has none of that id."""
        return [self._tokenizer.id_to_token(token) for token in ids]
