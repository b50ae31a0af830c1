"""An engine that speaks, and an adapter that changes what it says."""

from pathlib import Path

import pytest
from conftest import TinyEngine
from support.models.tiny_models import save_adapter
from support.spoken_engine import spoken_engine


@pytest.fixture(scope="session")
def engine(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine with words for its tokens, and a chat template."""
    return spoken_engine(tiny_engine.engine, tmp_path_factory.mktemp("spoken") / "engine")


@pytest.fixture(scope="session")
def adapter(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(
        tiny_engine.model,
        tmp_path_factory.mktemp("spoken") / "a",
        r=8,
        target_modules=["q_proj", "v_proj"],
    )
