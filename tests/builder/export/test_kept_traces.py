"""The graphs that tests keep of an earlier trace are those that the trace gives."""

from pathlib import Path

import pytest
from conftest import TinyEngine
from support.models import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.builder import build_engine


@pytest.mark.slow
def test_a_build_of_a_kept_trace_writes_the_same_files(
    tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("traced", "kept for it", "read from disk")
    configs = [tiny_config(tiny_engine.model, tmp_path / name) for name in names]
    build_engine(configs[0])
    quick_build.quick_build(configs[1])
    monkeypatch.setattr(quick_build, "_TRACES", quick_build._Traces())
    quick_build.quick_build(configs[2])
    first, *others = (
        {path.name: path.read_bytes() for path in config.output.iterdir()} for config in configs
    )
    assert others == [first, first]
