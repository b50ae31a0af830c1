"""An engine directory with a tokenizer of words and a chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

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


def word_engine(directory: Path, template: str | None = CHAT, **config: object) -> Path:
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


def words(ids: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in ids)
