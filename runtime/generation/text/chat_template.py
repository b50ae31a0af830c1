"""Jinja chat templates, rendered as transformers does, in a sandbox.

The only file that imports jinja2. A template comes with a model, from anybody: the sandbox lets it
neither call into Python nor change what it is given.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

# {"role": ..., "content": ...}: text, or parts of text: [{"type": "text", "text": ...}]
Message = Mapping[str, Any]

_MAX_CHARACTERS = 1 << 24  # of a conversation: more tokens than any model has positions for
_MARK = "WHERE-THE-ANSWER-GOES-ON "  # the space tells whether the template keeps those at an end
_PROBE = "PROBE"
# What a template is given under these names is said otherwise, or is no variable of its.
_RESERVED = frozenset(
    ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)


@short_repr
@dataclass(frozen=True)
class Chat:
    """A conversation as a prompt, and how the model's template writes it. Names are vLLM's."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True  # begin an answer of the assistant
    continue_final_message: bool = False  # end inside of the last message instead: it goes on
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of the model's template

    def __post_init__(self) -> None:
        """Refuse what no template can write.

        Raises:
            ConfigError: there are no messages, or they are none; an option is of another type,
                contradicts another, or has a name that is no variable of a template.
        """
        check_fields(self)
        _check_messages(self.messages)
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigError(
                "continue_final_message goes on with the last message, and add_generation_prompt "
                "begins another one; pass add_generation_prompt=False"
            )
        for name in self.chat_template_kwargs or ():
            if name in _RESERVED:
                raise ConfigError(
                    f"chat_template_kwargs has {name}, which is no variable of a template; pass it "
                    "to Chat, or leave it out"
                )


class ChatTemplate:
    """Turns a conversation into the text that the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Keep a template's source and the tokens it may name, such as `bos_token`.

        Raises:
            BackendError: jinja2 is not installed.
        """
        self._source, self._special_tokens = source, special_tokens
        self._environment = _environment()

    def render(self, chat: Chat) -> str:
        """Return the text of a conversation.

        Parts of a message come to a template that reads parts; to another one their text does, one
        a line.

        Raises:
            ConfigError: the template fails, refuses the conversation, writes without end, or not
                the message that is to go on.
        """
        messages: Sequence[Message]  # what is None reads as nothing in few templates
        messages = [{k: v for k, v in m.items() if v is not None} for m in chat.messages]
        if any(not isinstance(message["content"], str) for message in messages):
            messages = messages if self._reads_parts else [*map(_joined_parts, messages)]
        if not chat.continue_final_message:
            return self._rendered(chat, messages)
        last, marked = _marked(messages[-1])
        text = self._rendered(chat, [*messages[:-1], marked])
        before, mark, behind = text.rpartition(_MARK.strip())
        if not mark or last.strip() not in text:
            raise ConfigError(
                "the model's chat template does not write the last message as it is, so that "
                "nothing can go on with it; leave continue_final_message out"
            )
        return before if behind.startswith(" ") else before.rstrip()

    @cached_property
    def _template(self) -> Any:
        """The template, compiled: that takes many times as long as a conversation."""
        return self._environment.from_string(self._source)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes the text of a part, and not the part as Python shows it."""
        try:
            message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
            text = self._rendered(Chat([message]), [message])
        except ConfigError:
            return False
        return _PROBE in text and not any(f"{quote}{_PROBE}" in text for quote in "'\"")

    def _rendered(self, chat: Chat, messages: Sequence[Message]) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(chat.chat_template_kwargs or {}),
            "messages": messages,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return _joined(self._template.generate(variables))
        except Exception as error:  # a template is a program: it can fail in any way
            reason = " ".join(f"{error or type(error).__name__}".split())
            text = f"the model's chat template refuses the prompt: {reason:.200}"
            raise ConfigError(text) from error


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


def _check_messages(messages: Sequence[object]) -> None:
    if isinstance(messages, str) or not messages:
        raise ConfigError(
            f"a conversation is {messages!r:.80}, expected a list of one message or more"
        )
    for index, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        content = fields.get("content")
        parts = (
            content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
        )
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if kind != "text":
                raise ConfigError(
                    f"message {index} has a part of type {shown(kind):.80}, and an engine reads "
                    "text; expected {'type': 'text', 'text': ...}"
                )
        texts = [("role", fields.get("role"))]
        texts += [("content", part.get("text")) for part in parts or [{}]]
        for name, text in texts:
            if not isinstance(text, str):
                raise ConfigError(
                    f"message {index}: its {name} is {type(text).__name__}, expected a string: "
                    "{'role': 'user', 'content': 'text'}"
                )
            check_characters(text, f"the {name} of message {index}")


def _joined_parts(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _marked(message: Message) -> tuple[str, Message]:
    """The text that a message ends with, and the message with a mark behind it."""
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _MARK}
    text = content[-1]["text"]
    last = {**content[-1], "text": text + _MARK}
    return text, {**message, "content": [*content[:-1], last]}


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
