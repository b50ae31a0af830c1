"""The tiny engine with a word for each of its tokens: w0, w1, and so on."""

import shutil
from pathlib import Path

from support.models.tiny_sizes import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def spoken_engine(engine: Path, copy: Path, *, word_length: int = 0) -> Path:
    """Copy an engine and give it a tokenizer of words and a chat template.

    `word_length` is in characters; points fill words up to it.
    """
    shutil.copytree(engine, copy)
    return give_words(copy, word_length=word_length)


def give_words(engine: Path, *, word_length: int = 0) -> Path:
    """Write the tokenizer and the template into the directory of an engine; return it."""
    names = [f"w{n}".ljust(word_length, ".") for n in range(VOCABULARY)]
    words = Tokenizer(WordLevel({name: n for n, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(engine / "tokenizer.json"))
    (engine / "chat_template.jinja").write_text(TEMPLATE)
    return engine
