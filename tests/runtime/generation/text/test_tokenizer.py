"""Text to tokens and back."""

import builtins
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.word_tokenizer import CHAT, CONVERSATION, word_engine, words

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.generation.text.chat_template import Message
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer

# ----------------------------------------------------------------------------- encode and decode


def test_a_string_is_the_message_of_a_user(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path))
    ids = tokenizer.encode("hello world")
    assert words(ids) == "<user> hello world </s> <bot>"
    assert ids == tokenizer.encode([{"role": "user", "content": "hello world"}])


def test_a_conversation_is_neither_padded_nor_cut(tmp_path: Path) -> None:
    turns: list[Message] = [{"role": "user", "content": "how are you ?"}] * 3
    ids = TextTokenizer(word_engine(tmp_path)).encode(turns)
    assert words(ids) == "<user> how are you ? </s> " * 3 + "<bot>"


def test_without_a_template_a_string_is_plain_text_with_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path, None))
    assert words(tokenizer.encode("hello world")) == "<s> hello world"


def test_without_a_template_messages_are_refused(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path, None))
    with pytest.raises(ConfigError, match="no chat template; pass the prompt as a string"):
        tokenizer.encode(CONVERSATION)
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.render(CONVERSATION)


def test_decoding_leaves_special_tokens_out(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path))
    assert tokenizer.decode([1, 6, 7, 2, 0]) == "hello world"
    assert tokenizer.decode(()) == ""


def test_threads_share_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path))
    prompts = ["hello", "how are you ?", "hello world hello", ""] * 50
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(tokenizer.encode, prompts))
        texts = list(pool.map(tokenizer.decode, found))
    assert found == [tokenizer.encode(prompt) for prompt in prompts]
    assert texts == [tokenizer.decode(ids) for ids in found]


# ---------------------------------------------------------------------- what is no text or message


@pytest.mark.parametrize("template", [CHAT, None])
def test_half_a_character_in_a_prompt_is_named(tmp_path: Path, template: str | None) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path, template))
    with pytest.raises(ConfigError, match=r"has '\\udc80' at character \d+, a lone surrogate"):
        tokenizer.encode("hello \udc80 world")


def test_half_a_character_in_a_message_or_a_template_is_named(tmp_path: Path) -> None:
    message = r"has '\\ud83d' at character \d+, a lone surrogate"
    with pytest.raises(ConfigError, match=message):
        TextTokenizer(word_engine(tmp_path)).encode([{"role": "user", "content": "\ud83d"}])
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = TextTokenizer(word_engine(tmp_path, None, chat_template="text \ud83d"))
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], r"a conversation is \[\], expected a list of one message or more"),
        ({"role": "user", "content": "x"}, "prompt is {'.* [(]dict[)], expected str or Sequence"),
        (7, "prompt is 7 [(]int[)], expected str or Sequence"),
        (["hello"], "message 0: its role is NoneType, expected a string: {'role': 'user'"),
        ([*CONVERSATION, {"content": "x"}], r"message 3: its role is \w+, expected a string"),
        ([{"role": "user"}], r"message 0: its content is \w+, expected a string"),
        ([{"role": "user", "content": None}], r"message 0: its content is \w+, expected a string"),
        ([{"role": 1, "content": "x"}], r"message 0: its role is \w+, expected a string"),
        ([{"role": "user", "content": []}], r"message 0: its content is \w+, expected a string"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"message 0: its content is \w+, expected",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            "message 0 has a part of type 'image_url', and an engine reads text",
        ),
        ([{"role": "user", "content": ["x"]}], "message 0 has a part of type 'x', and an engine"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, messages: Any, said: str) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path))
    with pytest.raises(ConfigError, match=said):
        tokenizer.encode(messages)


# ---------------------------------------------------------------------------------- missing parts


def test_an_engine_without_a_tokenizer_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; pass .* token ids") as caught:
        TextTokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    (word_engine(tmp_path, None) / "tokenizer_config.json").unlink()
    assert words(TextTokenizer(tmp_path).encode("hello")) == "<s> hello"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("tokenizer.json", data) for data in (b"", b"{", b"[1]", b"\xff\xfe")),
        *(("tokenizer_config.json", data) for data in (b"", b"{", b"[1]", b"\xff\xfe")),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, data: bytes) -> None:
    (word_engine(tmp_path) / name).write_bytes(data)
    with pytest.raises(ConfigError, match=name):
        TextTokenizer(tmp_path)


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    word_engine(tmp_path)
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == missing:
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendError, match=rf"{missing}.*pip install 'trt-lora\[text\]'"):
        TextTokenizer(tmp_path)


def test_a_long_text_keeps_no_other_thread_waiting(tmp_path: Path) -> None:
    """`Tokenizer.encode` would: the thread beside it had a turn or two."""
    text = "hello " * 200_000
    tokenizer, turns, is_over = TextTokenizer(word_engine(tmp_path)), [0], threading.Event()

    def count() -> None:
        while not is_over.wait(0.001):
            turns.append(0)

    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(count)
        before = len(turns)
        ids = tokenizer.encode_text(text)
        between = len(turns) - before
        is_over.set()
        counting.result()
    assert between > 20
    assert ids == tokenizer._tokenizer.encode(text).ids
