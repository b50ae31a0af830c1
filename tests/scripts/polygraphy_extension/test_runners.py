"""The runners `--trt-lora` and `--lora-float64`."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polygraphy.exception import PolygraphyException
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest, tiny_model
from support.polygraphy_command import POLYGRAPHY_WARNINGS
from support.polygraphy_subject import Subject

from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.contract.operators import OPERATORS, Operator
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import MANIFEST_FILE, PLAN_FILE
from trt_lora.scripts.polygraphy_extension import tensorrt_runner as polygraphy_tensorrt
from trt_lora.scripts.polygraphy_extension.float64_runner import lora_float64
from trt_lora.scripts.polygraphy_extension.tensorrt_runner import (
    LoraTensorRTRunner,
    engine_with_plugin,
)
from trt_lora.scripts.verification.example_inputs import InputSpec, make_inputs

pytestmark = POLYGRAPHY_WARNINGS


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_reference_is_the_definition_rounded_once(operator: Operator, dtype: str) -> None:
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal((2, 3, 5)).astype(dtype)]
    expected = []
    for site in range(operator.sites):
        operands += [rng.standard_normal((5, site + 1)), rng.standard_normal((site + 1, 4))]
    for site in range(operator.sites):
        a, b = (operands[i].astype(dtype).astype("f8") for i in operator.factors(site))
        expected.append(np.einsum("bsk,kr,rn->bsn", operands[0].astype("f8"), a, b))
        if operator.has_addend:
            operands.append(rng.standard_normal((2, 3, 4)))
            expected[-1] += operands[-1].astype(dtype).astype("f8")
    found = lora_float64(operator, *(operand.astype(dtype) for operand in operands))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        ulp = np.abs(np.spacing(other.astype(dtype))).astype("f8")
        assert np.all(np.abs(one.astype("f8") - other) <= 0.51 * ulp)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    """A GPU with TensorRT-RTX that runs one tiny model."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    trt = FakeTensorRT(cuda)
    trt.install(monkeypatch)
    return trt


def test_the_plan_runs_as_users_run_it(
    gpu: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polygraphy_tensorrt, "engine_with_plugin", contextlib.nullcontext)
    gpu.manifest = small_manifest()
    directory = engine_directory(tmp_path / "engine", gpu.manifest)
    steps = make_inputs(directory, read_manifest(directory), InputSpec(shape=(2, 3)))
    with LoraTensorRTRunner(str(directory)) as runner:
        metadata = runner.get_input_metadata(use_numpy_dtypes=False)
        for step in steps:  # of two profiles
            found: Mapping[str, np.ndarray] = runner.infer(step)
            caches = {f"new_{n}": array.copy() for n, array in step.items() if "cache" in n}
            for name, expected in tiny_model({**step, **caches}).items():
                np.testing.assert_allclose(found[name], expected, rtol=1e-6)
            assert runner.inference_time
    assert list(metadata) == list(steps[0])
    assert list(metadata["input_ids"].shape) == [None, None]
    assert not list(gpu.contexts)  # all released


def test_a_plan_that_does_not_load_is_one_message(
    gpu: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polygraphy_tensorrt, "engine_with_plugin", contextlib.nullcontext)
    with pytest.raises(PolygraphyException, match="is not an engine directory"):
        LoraTensorRTRunner(str(tmp_path)).activate()


@pytest.mark.slow
def test_a_plan_with_the_plugin_is_built_where_there_is_none(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    made: list[Compiler] = []

    def compiler(*args: Any, **options: Any) -> Compiler:
        made.append(Compiler(*args, **options))
        return made[-1]

    monkeypatch.setattr(polygraphy_tensorrt, "Compiler", compiler)
    with engine_with_plugin(subject.engine) as directory:
        manifest = read_manifest(directory)
        assert (manifest.flavour, manifest.lora_plugin) == ("tensorrt-rtx", "plugin")
        assert (directory / PLAN_FILE).stat().st_size > 0
    assert [found.lora_plugin for found in made] == ["plugin"]
    assert not directory.exists()
    assert not (subject.engine / PLAN_FILE).exists()


def test_a_plan_with_the_plugin_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = engine_directory(tmp_path / "engine")
    manifest = replace(read_manifest(directory), lora_plugin="plugin")
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    with engine_with_plugin(directory) as found:
        assert found == directory
