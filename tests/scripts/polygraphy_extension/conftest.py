"""The engine that the tests of the extension run."""

import pytest
from conftest import TinyEngine
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, tiny_config
from support.polygraphy_subject import Subject
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("[UNK]", "name", "a", "fruit")


@pytest.fixture(scope="session")
def subject(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A copy of the tiny engine, on all linears, and its adapters."""
    folder = tmp_path_factory.mktemp("polygraphy")
    engine = folder / "engine"
    quick_build(tiny_config(tiny_engine.model, engine))
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(engine / "tokenizer.json"))
    b = save_adapter(tiny_engine.model, folder / "b", r=8, seed=1)
    return Subject(engine, tiny_engine.adapter, b)
