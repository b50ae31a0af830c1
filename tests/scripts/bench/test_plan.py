"""An engine's step and switch, and the host's part of a step, as workloads: on fakes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory
from support.fakes.tiny_static_engine import static_manifest

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.scripts.bench import host_step, plan


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TensorRTEngine]:
    """The fake TensorRT's tiny engine, on a GPU on which a test must leave nothing behind."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    trt = FakeTensorRT(cuda)
    trt.install(monkeypatch)
    trt.manifest = static_manifest()
    directory = engine_directory(tmp_path / "engine", trt.manifest)
    with TensorRTEngine(directory, trt.manifest) as opened:
        yield opened
    cuda.check()


def test_a_plan_is_measured_with_every_adapter_and_its_switch(engine: TensorRTEngine) -> None:
    *answers, switch = plan.rows("tiny", engine, {}, rounds=1)
    assert [row.name for row in answers][:2] == ["tiny m1 (base)", "tiny m1 random, rank 4"]
    assert all(row.variants["token, ms"] > 0 for row in answers)
    assert switch.name == "tiny switch"
    assert switch.sizes["bindings"] == len(engine.manifest.lora_bindings)
    assert switch.variants["median, us"] > 0


def test_a_switch_that_moves_tensors_is_an_error(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers = iter(range(100))
    monkeypatch.setattr(plan, "_pointers", lambda manager, name: [next(pointers)])
    with pytest.raises(StateError, match="500 switches have moved the tensors"):
        list(plan.rows("tiny", engine, {}, rounds=1))


@pytest.mark.parametrize("way", host_step.WAYS)
@pytest.mark.parametrize("logits", host_step.PEAKS)
def test_the_hosts_part_of_a_step_is_measured_without_the_engines(way: str, logits: str) -> None:
    row = host_step.measure(2, way, logits, steps=3)
    assert row.name == f"2 rows, {way}, {logits}"
    assert 0 < row.variants["step, ms"] <= row.variants["slowest step, ms"]


def test_time_inside_the_engine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Slow(host_step.StubEngine):
        def execute(self, tensor_map):  # type: ignore[no-untyped-def]
            clock[0] += 5
            self.seconds += 5
            return super().execute(tensor_map)

    monkeypatch.setattr(host_step, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(host_step, "StubEngine", Slow)
    assert host_step.measure(2, "greedy", "peaked", steps=3).variants["slowest step, ms"] == 0
