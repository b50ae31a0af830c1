"""An engine of two plans, an encoder's and a step's, on a fake TensorRT."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import (
    CROSS_KEY,
    CROSS_VALUE,
    EMBEDDING,
    ENCODER_SITE,
    WIDTH,
    encoder_manifest,
    engine_directory,
)
from support.models.tiny_model_runs import manager_of
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime import SamplingParams
from trt_lora.runtime.engines.engine import encoder_of
from trt_lora.runtime.engines.interface import check_manifest
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.generation.decoding.source_encoder import SourceEncoder
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.manifest import ENCODER_FILES, Binding, load_manifest
from trt_lora.runtime.memory.dtypes import Array

TWO_TOKENS = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
A, B = np.full((WIDTH, 2), 0.5, np.float32), np.full((2, WIDTH), 0.25, np.float32)
NONE = np.zeros((WIDTH, WIDTH), np.float32)


@pytest.fixture
def engine(trt: FakeTensorRT, tmp_path: Path) -> TensorRTEngine:
    """An engine with an encoder, not entered."""
    trt.manifest = encoder_manifest()
    return TensorRTEngine(engine_directory(tmp_path / "engine", trt.manifest), trt.manifest)


def test_the_manifest_of_the_fake_does_not_contradict_itself(engine: TensorRTEngine) -> None:
    check_manifest(engine.directory, load_manifest(engine.directory))


def test_an_encoder_writes_a_row_of_the_cross_cache_with_its_adapter(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scheduler, on the device: the fake notes what is read while it is written."""
    written = list[tuple[Array, Array]]()
    encode = SourceEncoder.encode

    def noted(self: SourceEncoder, sequence: Sequence) -> None:
        encode(self, sequence)
        views = self._cache.views(self._cache.row_of(sequence), 1)
        written.append((views[CROSS_KEY].numpy(), views[CROSS_VALUE].numpy()))

    monkeypatch.setattr(SourceEncoder, "encode", noted)
    names = (f"lora_A_{ENCODER_SITE.path}", f"lora_B_{ENCODER_SITE.path}")
    with engine:
        engine.warm_up()
        store = manager_of(engine, a=dict(zip(names, (A, B), strict=True))).store
        scheduler = scheduler_of(engine, store)
        for name, source in (("a", [3, 1, 4]), (None, [1, 5])):
            scheduler.submit([0], TWO_TOKENS, adapter=name, source=source)
        tokens = [token for _ in range(2) for token in step_of(scheduler)]
        del scheduler, store
    assert len(tokens) == 4
    for (keys, values), source, delta in zip(
        written, ([3, 1, 4], [1, 5]), (A @ B, NONE), strict=True
    ):
        x = EMBEDDING.astype(np.float32)[source]
        np.testing.assert_allclose(values[0, 0, : len(source)], x)
        np.testing.assert_allclose(keys[0, 0, : len(source)], x + x @ delta)


def test_a_step_with_a_second_stream_says_nothing_of_its_encoder(
    trt: FakeTensorRT, tmp_path: Path
) -> None:
    manifest = replace(encoder_manifest(), second_stream=True)
    hidden = Binding("second_stream", "float32", ("batch", 1, 1, 1))
    trt.manifest = replace(manifest, outputs=(*manifest.outputs, hidden))
    with TensorRTEngine(engine_directory(tmp_path / "engine", manifest), manifest) as engine:
        assert encoder_of(engine) is not None


def test_a_refused_encoder_leaves_no_step_open(engine: TensorRTEngine, trt: FakeTensorRT) -> None:
    (engine.directory / ENCODER_FILES.plan).write_bytes(b"another plan")
    with pytest.raises(BackendError, match=r"refuses .*encoder\.plan"):
        engine.__enter__()
    assert not list(trt.contexts)
