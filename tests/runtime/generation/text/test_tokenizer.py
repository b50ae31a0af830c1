"""Text to tokens and back: chat templates as transformers renders them, in a sandbox."""

import builtins
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.generation.text.chat_template import Message
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.needs_torch

WORDS = "<pad> <s> </s> <unk> <user> <bot> hello world how are you ?".split()  # noqa: SIM905
CHAT = (
    "{% for message in messages %}\n"
    "    <{{ message['role'] }}> {{ message['content'] }} </s>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n<bot>{% endif %}"
)
CONVERSATION: list[dict[str, str]] = [
    {"role": "user", "content": "hello"},
    {"role": "bot", "content": "<b>how & why</b> 'é'"},
    {"role": "user", "content": "world"},
]


def engine(directory: Path, template: str | None = CHAT, **config: object) -> Path:
    """An engine directory with a word tokenizer that puts <s> before plain text."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:6])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_padding(length=20)  # what a checkpoint may have left in the file
    tokenizer.enable_truncation(4)
    tokenizer.save(str(directory / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>", "special": True}  # as transformers writes it
    fields = {"bos_token": "<s>", "eos_token": end, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def rendered(directory: Path, template: str) -> str:
    return TextTokenizer(engine(directory, template)).render(CONVERSATION)


def words(ids: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


# ------------------------------------------------------------------------- against transformers

BREAK = (
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}"
)
NAMESPACE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{{ ns.n }} {{ messages[-1]['content'] | trim }}"
)
GENERATION = (
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(CHAT, id="chat"),
        pytest.param("a\n  {% if true %}\n  b\n  {% endif %}\n\nc\n", id="blanks"),
        pytest.param("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}", id="special tokens"),
        pytest.param("{{ bos_token + messages[0].content + eos_token }}", id="sum of tokens"),
        pytest.param("{{ messages[1]['content'] }}", id="nothing escaped"),
        pytest.param("{{ messages | tojson }}", id="tojson"),
        pytest.param("{{ messages | tojson(indent=2) }}", id="tojson indent"),
        pytest.param("{{ messages | tojson(separators=(',', ':')) }}", id="tojson separators"),
        pytest.param(
            "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True) }}",
            id="tojson ascii",
        ),
        pytest.param(
            "{% if tools %}tools{% endif %}{% if documents %}docs{% endif %}.", id="if tools"
        ),
        pytest.param("{% if tools is not none %}tools{% endif %}.", id="tools is none"),
        pytest.param("{% if documents is not none %}docs{% endif %}.", id="documents is none"),
        pytest.param("{% if tools is defined %}defined{% endif %}.", id="tools is defined"),
        pytest.param(BREAK, id="break and continue"),
        pytest.param(GENERATION, id="generation"),
        pytest.param(NAMESPACE, id="namespace"),
        pytest.param("{{ dict(a=1)['a'] }}", id="dict"),
        pytest.param("{{ strftime_now('%Y') | length }}", id="strftime_now"),
        pytest.param(
            "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].role) }}", id="macro"
        ),
        pytest.param("{{ messages[0].thinking }}{{ nothing }}.", id="undefined"),
        pytest.param("{{ messages[0]['content'].split('l')[-1].upper() }}", id="methods"),
        pytest.param("{{ messages[1:] | map(attribute='role') | join(',') }}", id="filters"),
    ],
)
def test_a_template_is_rendered_as_transformers_renders_it(tmp_path: Path, template: str) -> None:
    text = rendered(tmp_path, template)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert text == reference.apply_chat_template(
        CONVERSATION, chat_template=template, tokenize=False, add_generation_prompt=True
    )


def test_a_special_token_that_the_model_does_not_have_is_rendered_as_nothing(
    tmp_path: Path,
) -> None:
    engine(tmp_path, "{{ bos_token }}{{ messages[0].content }}", bos_token=None)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CONVERSATION, tokenize=False)
    assert TextTokenizer(tmp_path).render(CONVERSATION) == expected == "hello"


def test_the_default_of_several_named_templates_is_used(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    engine(tmp_path, None, chat_template=named)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CONVERSATION, tokenize=False)
    assert TextTokenizer(tmp_path).render(CONVERSATION) == expected == "hello"


def test_a_template_file_comes_before_the_one_in_the_config(tmp_path: Path) -> None:
    engine(tmp_path, "file", chat_template="config")
    assert TextTokenizer(tmp_path).render(CONVERSATION) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    assert TextTokenizer(tmp_path).render(CONVERSATION) == "config"


# ----------------------------------------------------------------------------- encode and decode


def test_a_string_is_the_message_of_a_user(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(engine(tmp_path))
    ids = tokenizer.encode("hello world")
    assert words(ids) == "<user> hello world </s> <bot>"
    assert ids == tokenizer.encode([{"role": "user", "content": "hello world"}])


def test_a_conversation_is_neither_padded_nor_cut(tmp_path: Path) -> None:
    turns: list[Message] = [{"role": "user", "content": "how are you ?"}] * 3
    ids = TextTokenizer(engine(tmp_path)).encode(turns)
    assert words(ids) == "<user> how are you ? </s> " * 3 + "<bot>"


def test_without_a_template_a_string_is_plain_text_with_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(engine(tmp_path, None))
    assert words(tokenizer.encode("hello world")) == "<s> hello world"


def test_without_a_template_messages_are_refused(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(engine(tmp_path, None))
    with pytest.raises(ConfigError, match="no chat template; pass the prompt as a string"):
        tokenizer.encode(CONVERSATION)
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.render(CONVERSATION)


def test_decoding_leaves_special_tokens_out(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(engine(tmp_path))
    assert tokenizer.decode([1, 6, 7, 2, 0]) == "hello world"
    assert tokenizer.decode(()) == ""


def test_threads_share_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(engine(tmp_path))
    prompts = ["hello", "how are you ?", "hello world hello", ""] * 50
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(tokenizer.encode, prompts))
        texts = list(pool.map(tokenizer.decode, found))
    assert found == [tokenizer.encode(prompt) for prompt in prompts]
    assert texts == [tokenizer.decode(ids) for ids in found]


# ---------------------------------------------------------------------------------------- sandbox


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__.items() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_a_template_that_reaches_into_python_is_refused(tmp_path: Path, template: str) -> None:
    before = json.dumps(CONVERSATION)
    with pytest.raises(ConfigError, match="chat template"):
        rendered(tmp_path, template)
    assert json.dumps(CONVERSATION) == before


@pytest.mark.parametrize("probe", ["''.__class__", "''|attr('__class__')|attr('__mro__')"])
def test_a_class_is_not_even_shown(tmp_path: Path, probe: str) -> None:
    assert rendered(tmp_path, f"[{{{{ {probe} }}}}]") == "[]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ none | tojson(no_such_option=1) }}", "no_such_option"),
    ],
)
def test_a_template_that_fails_is_refused_with_its_own_words(
    tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"chat template .*{message}"):
        rendered(tmp_path, template)


LONG_LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion depth"),
        (f"{{{{ {'(' * 3000}1{')' * 3000} }}}}", "recursion depth"),
        ("{% for i in range(9) %}" * 25 + "{% endfor %}" * 25, "too many .* nested blocks"),
        (f"{LONG_LOOP * 2}text{'{% endfor %}' * 2}", "it writes more than 16777216 characters"),
        ("{{ raise_exception('first\nsecond') }}", "first second$"),
    ],
)
def test_a_template_without_end_is_refused_in_one_line(
    tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^.*chat template .*{message}") as caught:
        rendered(tmp_path, template)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- what is no text or message


@pytest.mark.parametrize("template", [CHAT, None])
def test_half_a_character_in_a_prompt_is_named(tmp_path: Path, template: str | None) -> None:
    tokenizer = TextTokenizer(engine(tmp_path, template))
    with pytest.raises(ConfigError, match=r"has '\\udc80' at character \d+, a lone surrogate"):
        tokenizer.encode("hello \udc80 world")


def test_half_a_character_in_a_message_or_a_template_is_named(tmp_path: Path) -> None:
    message = r"has '\\ud83d' at character \d+, a lone surrogate"
    with pytest.raises(ConfigError, match=message):
        TextTokenizer(engine(tmp_path)).encode([{"role": "user", "content": "\ud83d"}])
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = TextTokenizer(engine(tmp_path, None, chat_template="text \ud83d"))
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], r"a conversation is \[\], expected a list of one message or more"),
        ({"role": "user", "content": "x"}, "prompt is {'.* [(]dict[)], expected str or Sequence"),
        (7, "prompt is 7 [(]int[)], expected str or Sequence"),
        (["hello"], "message 0 is 'hello': its role is no string; expected {'role': 'user'"),
        ([*CONVERSATION, {"content": "x"}], "message 3 is .*: its role is no string"),
        ([{"role": "user"}], "message 0 is .*: its content is no string"),
        ([{"role": "user", "content": None}], "message 0 is .*: its content is no string"),
        ([{"role": 1, "content": "x"}], "message 0 is .*: its role is no string"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "message 0 is .*: its content is no string",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, messages: Any, said: str) -> None:
    tokenizer = TextTokenizer(engine(tmp_path))
    with pytest.raises(ConfigError, match=said):
        tokenizer.encode(messages)


# ---------------------------------------------------------------------------------- missing parts


def test_an_engine_without_a_tokenizer_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; pass .* token ids") as caught:
        TextTokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    (engine(tmp_path, None) / "tokenizer_config.json").unlink()
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
    (engine(tmp_path) / name).write_bytes(data)
    with pytest.raises(ConfigError, match=name):
        TextTokenizer(tmp_path)


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    engine(tmp_path)
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == missing:
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendError, match=rf"{missing}.*pip install 'trt-lora\[text\]'"):
        TextTokenizer(tmp_path)
