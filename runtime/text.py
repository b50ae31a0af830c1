"""Text to tokens and back, with the tokenizer and chat template of an engine directory.

The only file that imports tokenizers and jinja2. A template comes with a model, from anybody: it is
rendered in jinja2's sandbox, which lets it neither call into Python nor change what it is given.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from trt_lora.plugins.errors import BackendError, ConfigError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class TextTokenizer:
    """The tokenizer and the chat template of an engine."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        Raises:
            BackendError: tokenizers or jinja2 is not installed.
            ConfigError: the engine has no tokenizer.
        """
        try:
            import jinja2.sandbox
            import tokenizers
        except ImportError as error:
            raise BackendError(f"{error}; pip install 'trt-lora[text]'") from error
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no {TOKENIZER_FILE}; pass prompts as lists of token ids, "
                "or build from a model directory that has a fast tokenizer"
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = _read_config(directory)
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        self._environment.globals.update(
            raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form)
        )
        self._environment.filters["tojson"] = _to_json
        self._template = _read_template(directory, self._config)

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt.

        A string is one message of a user if the model has a chat template, else plain text.

        Raises:
            ConfigError: messages are given but the model has no template, or it refuses them.
        """
        if self._template is None:
            if not isinstance(prompt, str):
                raise ConfigError("this model has no chat template; pass the prompt as a string")
            return list(self._tokenizer.encode(prompt).ids)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, ready for the assistant's answer.

        Raises:
            ConfigError: there is no template, or it fails.
        """
        import jinja2

        if self._template is None:
            raise ConfigError("this model has no chat template")
        special = {k: v for k, v in self._config.items() if k.endswith("_token")}
        try:
            return self._environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **special
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template refuses the prompt: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / TOKENIZER_CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    """A special token is a string, or an object with its content."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / TEMPLATE_FILE
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    return template if isinstance(template, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers defines it: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
