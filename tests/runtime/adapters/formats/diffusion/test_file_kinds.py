"""Every row of the table of files in docs/adapters.md: scale * B A by hand, or refused by name."""

from pathlib import Path

import pytest
from support.adapters.diffusion.file_kinds import FILE_KINDS, FileKind
from support.adapters.diffusion.models import assert_same, deltas, engine
from support.adapters.diffusion.writing import Writing
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.load import load_adapter

READ = [kind for kind in FILE_KINDS if not kind.refusal]
REFUSED = [kind for kind in FILE_KINDS if kind.refusal]


def written(kind: FileKind, folder: Path) -> tuple[Path, Writing]:
    writing = Writing(engine(kind.model))
    kind.write(writing)
    return writing.save(folder / "adapter.safetensors"), writing


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.title)
def test_is_read_to_what_it_says(tmp_path: Path, kind: FileKind) -> None:
    file, writing = written(kind, tmp_path)
    assert writing.expected
    assert_same(deltas(file, engine(kind.model)), writing.expected)


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.title)
def test_every_tensor_is_bound(tmp_path: Path, kind: FileKind) -> None:
    file, writing = written(kind, tmp_path)
    coverage = preview_adapter(load_adapter(file, engine(kind.model)), engine(kind.model))
    assert coverage.bound.keys() == writing.tensors.keys()
    assert not coverage.ignored


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.title)
def test_is_refused_by_name(tmp_path: Path, kind: FileKind) -> None:
    file, _ = written(kind, tmp_path)
    with refused(AdapterError, file, kind.refusal):
        deltas(file, engine(kind.model))
