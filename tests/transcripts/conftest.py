"""The engine that answers in the transcripts."""

from pathlib import Path

import pytest
from conftest import TinyEngine
from support.spoken_engine import spoken_engine


@pytest.fixture(scope="session")
def spoken(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine with words for its tokens."""
    return spoken_engine(tiny_engine.engine, tmp_path_factory.mktemp("spoken") / "engine")
