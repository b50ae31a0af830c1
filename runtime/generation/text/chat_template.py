"""Jinja chat templates, rendered as transformers does, in a sandbox.

The only file that imports jinja2. A template comes with a model, from anybody: the sandbox lets it
neither call into Python nor change what it is given.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from trt_lora.plugins.errors import BackendError, ConfigError

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

Message = Mapping[str, str]  # {"role": ..., "content": ...}

_MAX_CHARACTERS = 1 << 24  # of a conversation: more tokens than any model has positions for


class ChatTemplate:
    """Turns a conversation into the text that the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Keep a template's source and the tokens it may name, such as `bos_token`.

        Raises:
            BackendError: jinja2 is not installed.
        """
        self._source, self._special_tokens = source, special_tokens
        self._environment = _environment()

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, ready for the assistant's answer.

        Raises:
            ConfigError: there are no messages, or they are none; the template fails, refuses the
                conversation, or writes without end.
        """
        _check_messages(messages)
        try:
            parts = self._environment.from_string(self._source).generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
            return _joined(parts)
        except Exception as error:  # a template is a program: it can fail in any way
            reason = " ".join(f"{error or type(error).__name__}".split())
            raise ConfigError(f"the model's chat template refuses the prompt: {reason}") from error


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Read the template of an engine directory, if there is one.

    Raises:
        ConfigError: a file is damaged.
        BackendError: jinja2 is not installed.
    """
    config_path, path = directory / CONFIG_FILE, directory / TEMPLATE_FILE
    try:
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        tokens = {name: _content(value) for name, value in config.items()}
        source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {item["name"]: item["template"] for item in source}.get("default")
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} or {config_path} cannot be read: {error}; build the engine again"
        ) from error
    if not isinstance(source, str):
        return None
    special = {k: v for k, v in tokens.items() if k.endswith("_token") and isinstance(v, str)}
    return ChatTemplate(source, special)


def check_characters(text: str, label: str) -> None:
    """Refuse a text that is not Unicode; a string of Python may hold halves of characters.

    Raises:
        ConfigError: it holds one; the message begins with `label`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{label} has {text[error.start]!r} at character {error.start}, a lone surrogate and "
            "no character; where it was read, decode it with errors='replace'"
        ) from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            f"a conversation is {messages!r:.80}, expected a list of one message or more"
        )
    for index, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        for name in ("role", "content"):
            if not isinstance(fields.get(name), str):
                raise ConfigError(
                    f"message {index} is {message!r:.80}: its {name} is no string; "
                    "expected {'role': 'user', 'content': 'text'}"
                )
            check_characters(fields[name], f"the {name} of message {index}")


def _joined(parts: Iterable[str]) -> str:
    """Join what a template writes, as long as that is no more than a model can read."""
    text, length = [], 0
    for part in parts:
        text.append(part)
        length += len(part)
        if length > _MAX_CHARACTERS:
            raise ValueError(f"it writes more than {_MAX_CHARACTERS} characters")
    return "".join(text)


def _content(value: Any) -> Any:
    """A special token is a string, or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _environment() -> Any:
    """A sandbox with the tags, filters and functions that transformers gives to templates."""
    try:
        import jinja2.sandbox
    except ImportError as error:
        raise BackendError(f"{error}; pip install 'trt-lora[text]'") from error
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_tag()],
    )
    environment.globals.update(
        raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form)
    )
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of transformers; jinja2's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _generation_tag() -> Any:
    """`{% generation %}` marks what to train on; its body is rendered as it is."""
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return Generation


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
