"""Chat templates as transformers renders them, in a sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import SandboxedEnvironment
from support.word_tokenizer import CHAT, CONVERSATION, word_engine, words
from transformers import PreTrainedTokenizerFast

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.needs_torch


def rendered(directory: Path, template: str) -> str:
    return TextTokenizer(word_engine(directory, template)).render(CONVERSATION)


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
    word_engine(tmp_path, "{{ bos_token }}{{ messages[0].content }}", bos_token=None)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CONVERSATION, tokenize=False)
    assert TextTokenizer(tmp_path).render(CONVERSATION) == expected == "hello"


def test_the_default_of_several_named_templates_is_used(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    word_engine(tmp_path, None, chat_template=named)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CONVERSATION, tokenize=False)
    assert TextTokenizer(tmp_path).render(CONVERSATION) == expected == "hello"


def test_a_template_file_comes_before_the_one_in_the_config(tmp_path: Path) -> None:
    word_engine(tmp_path, "file", chat_template="config")
    assert TextTokenizer(tmp_path).render(CONVERSATION) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    assert TextTokenizer(tmp_path).render(CONVERSATION) == "config"


# ---------------------------------------------------------------------------- how it is rendered

# The shapes that templates on the hub have: turns with headers; contents trimmed; turns between
# marks that must alternate; roles renamed; parts; a variable of its own.
IM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{- bos_token }}{% for m in messages %}"
    "{{ '<h>' + m['role'] + '</h>\n\n' + m['content'] | trim + '<eot>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}"
)
MARKS = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
RENAMED = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else "
    "m.role %}<turn>{{ role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = IM.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% endif %}",
)
SHAPES = {
    "im": IM,
    "headers": HEADERS,
    "marks": MARKS,
    "renamed": RENAMED,
    "parts": PARTS,
    "thinking": THINKING,
}
TURNS = [
    {"role": "user", "content": " hello\n"},
    {"role": "assistant", "content": " how are "},
]


def by_transformers(directory: Path, messages: Any, **options: Any) -> str:
    reference: Any = PreTrainedTokenizerFast.from_pretrained(directory)
    return str(reference.apply_chat_template(messages, tokenize=False, **options))


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory for each of the templates."""
    return word_engine(tmp_path, SHAPES[request.param])


@pytest.mark.parametrize("adds", [True, False])
def test_an_answer_is_begun_or_not_as_transformers_does(shape: Path, adds: bool) -> None:
    text = TextTokenizer(shape).render(Chat(TURNS, add_generation_prompt=adds))
    assert text == by_transformers(shape, TURNS, add_generation_prompt=adds)


@pytest.mark.parametrize("last", ["how are", " how are ", "how\n are\n\n", "", " "])
def test_the_last_message_goes_on_where_transformers_ends_it(shape: Path, last: str) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": last}]
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert TextTokenizer(shape).render(chat) == by_transformers(
        shape, messages, continue_final_message=True
    )


def test_a_field_that_is_none_is_not_there_as_for_transformers(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls is defined }}{% endfor %}"
    messages = [{"role": "user", "content": "hello", "tool_calls": None}]
    directory = word_engine(tmp_path, template)
    assert TextTokenizer(directory).render(messages) == "helloFalse"
    assert by_transformers(directory, messages) == "helloFalse"


def test_a_message_that_a_template_changes_cannot_go_on(tmp_path: Path) -> None:
    chat = Chat(TURNS, add_generation_prompt=False, continue_final_message=True)
    for template in ("{{ messages[0].content }}", IM.replace("m.content", "m.content | upper")):
        with pytest.raises(ConfigError, match="does not write the last message as it is"):
            TextTokenizer(word_engine(tmp_path, template)).render(chat)
        with pytest.raises(ValueError, match="the final message does not appear"):
            by_transformers(tmp_path, TURNS, continue_final_message=True)


@pytest.mark.parametrize("name", ["im", "thinking"])
@pytest.mark.parametrize("given", [{}, {"enable_thinking": False}, {"bos_token": "x", "tools": []}])
def test_variables_of_a_template_come_to_it(tmp_path: Path, name: str, given: Any) -> None:
    directory = word_engine(tmp_path, SHAPES[name] + "{{ bos_token }}{{ tools is none }}")
    text = TextTokenizer(directory).render(Chat(TURNS, chat_template_kwargs=given))
    assert text == by_transformers(directory, TURNS, add_generation_prompt=True, **given)
    assert ("<think>" in text) == (name == "thinking" and "enable_thinking" in given)


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "continue_final_message", "tokenize"]
)
def test_what_is_no_variable_of_a_template_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"chat_template_kwargs has {name}, which is no variable"):
        Chat(TURNS, chat_template_kwargs={name: 1})


def test_to_go_on_and_to_begin_an_answer_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="pass add_generation_prompt=False"):
        Chat(TURNS, continue_final_message=True)
    with pytest.raises(ConfigError, match=r"continue_final_message is 1 \(int\), expected bool"):
        Chat(TURNS, add_generation_prompt=False, continue_final_message=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


TEXTS = ["hello ", " world"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_parts_are_rendered_as_vllm_does(shape: Path, goes_on: bool) -> None:
    """As they are where the template reads parts; else their text, one a line."""
    parts: Any = [{"type": "text", "text": text} for text in TEXTS]
    messages: Any = [TURNS[0], {"role": "assistant", "content": parts}]
    as_text = [TURNS[0], {"role": "assistant", "content": "\n".join(TEXTS)}]
    chat = Chat(messages, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    reads_parts = (shape / "chat_template.jinja").read_text() == PARTS
    assert TextTokenizer(shape).render(chat) == by_transformers(
        shape,
        messages if reads_parts else as_text,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )
    assert parts == [{"type": "text", "text": text} for text in TEXTS]


@pytest.mark.parametrize("written", ["m.content", "m.content | tojson", "m.content | string"])
def test_a_template_that_shows_parts_as_python_does_reads_none(
    tmp_path: Path, written: str
) -> None:
    template = f"{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}"
    tokenizer = TextTokenizer(word_engine(tmp_path, template))
    parts = [{"type": "text", "text": "how"}, {"type": "text", "text": "are"}]
    assert tokenizer.render([{"role": "user", "content": parts}]).strip('"') in (
        "how\nare",
        "how\\nare",
    )


def test_a_template_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path))
    first = tokenizer.render(CONVERSATION)
    monkeypatch.setattr(SandboxedEnvironment, "compile", None)
    assert tokenizer.render(CONVERSATION) == first


def test_a_conversation_with_options_is_a_prompt(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(word_engine(tmp_path))
    assert words(tokenizer.encode(Chat(CONVERSATION[:1]))) == "<user> hello </s> <bot>"
    chat = Chat(CONVERSATION[:1], add_generation_prompt=False, continue_final_message=True)
    assert words(tokenizer.encode(chat)) == "<user> hello"


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
