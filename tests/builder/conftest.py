"""Base models as transformers saves them."""

from pathlib import Path

import pytest
from support.models.tiny_models import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose head is not tied."""
    return save_model("Llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one weight for the embeddings and the head."""
    directory = tmp_path_factory.mktemp("tied") / "model"
    return save_model("Llama", directory, tie_word_embeddings=True)
