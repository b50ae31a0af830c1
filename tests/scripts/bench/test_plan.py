"""An engine's step and switch, and the host's part of a step, as workloads: on fakes."""

import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from support.commands import trt_lora
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.models.loaded_base import loaded
from support.schedulers import scheduler_of

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.errors import StateError
from trt_lora.plugins.tensorrt.flavour import TENSORRT, TENSORRT_RTX, flavour_named
from trt_lora.runtime import SamplingParams
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.manifest import ONNX_FILE, read_manifest
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.scripts.bench import host_step, plan
from trt_lora.scripts.bench.gpu import llama_engines
from trt_lora.scripts.bench.gpu.random_codes import KINDS, with_random_codes
from trt_lora.scripts.bench.llama import LayerShape
from trt_lora.scripts.measuring.turns import Spread
from trt_lora.scripts.measuring.worker import Skipped


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The fake TensorRT's tiny engine, on a GPU on which a test must leave nothing behind."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    trt = FakeTensorRT(cuda)
    trt.install(monkeypatch)
    trt.manifest = small_manifest()
    yield engine_directory(tmp_path / "engine", trt.manifest)
    cuda.check()


@pytest.fixture
def engine(directory: Path) -> Iterator[TensorRTEngine]:
    """The same, running."""
    with TensorRTEngine(directory, read_manifest(directory)) as opened:
        yield opened


def test_bench_measures_the_plan_where_a_gpu_is(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = json.loads(trt_lora(capsys, "bench", directory, "--rounds", "1", "--json"))
    assert benchmark["backend"] == "TensorRT"
    assert benchmark["machine"]["gpu"]
    assert "free on the GPU" in benchmark["memory_bytes"]


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


def installed(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let every flavour of TensorRT be a module that can or cannot be imported."""
    monkeypatch.setattr(plan, "flavour_named", lambda name: replace(TENSORRT, module=module))


def test_every_plan_of_a_gpu_is_measured(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "json")
    built: list[str] = []

    def build(folder: Path, flavour: str, shape: LayerShape) -> dict[str, Path]:
        built.append(flavour)
        return dict.fromkeys(("plugin", "base"), Path())

    monkeypatch.setattr(plan, "build", build)
    monkeypatch.setattr(plan, "open_engine", lambda directory, backend: nullcontext(engine))
    rows = list(plan.gpu_rows("tensorrt-rtx"))
    names = [row.name for row in rows]
    idle = [row for row in rows if row.name.startswith("idle nodes m")]
    assert names[: len(idle)] == [row.name for row in idle]
    assert all("idle / without" in row.ratios for row in idle)
    assert [row.sizes["rows"] for row in idle] == [1, engine.manifest.max_batch_size]
    assert names[len(idle)].startswith("plugin m")
    assert names[-1].startswith("base ")
    assert built == ["tensorrt-rtx"]


def test_idle_nodes_are_beside_an_engine_without_them(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(["first", "second"])
    monkeypatch.setattr(plan, "run_of", lambda *args: next(runs))
    monkeypatch.setattr(plan, "_token_ms", lambda run, *_: {"first": 3.0, "second": 2.0}[run])
    row, *_ = plan.idle_rows(engine, engine, rounds=2)
    assert row.variants == {"idle, token, ms": 3.0, "without, token, ms": 2.0}
    ratio = row.ratios["idle / without"]
    assert isinstance(ratio, Spread)
    assert ratio.median == 1.5


def test_where_a_flavour_is_missing_or_nothing_builds_engines_plans_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "no_such_module")
    with pytest.raises(Skipped, match="tensorrt is not installed"):
        next(plan.gpu_rows("tensorrt"))
    installed(monkeypatch, "json")
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="transformers, which is not installed"):
        next(plan.gpu_rows("tensorrt"))


@pytest.mark.slow
def test_a_plan_decodes_on_one_stream_and_prefills_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, of a quarter of the real widths."""
    flavour = flavour_named("tensorrt-rtx")
    if not flavour.installed:
        pytest.skip("TensorRT-RTX is not installed")
    monkeypatch.setattr(llama_engines, "LAYERS", 1)
    model = llama_engines.save_model(
        tmp_path / "model", LayerShape(hidden=1024, keys=256, inner=3584)
    )
    options: dict[str, Any] = {"flavour": "none", "lora_plugin": "plugin", "dtype": "float16"}
    options |= {"max_input_len": llama_engines.MAX_PROMPT, "max_seq_len": llama_engines.MAX_TOKENS}
    build_engine(BuildConfig(model, tmp_path / "engine", ("all-linear",), **options))
    manifest, onnx = read_manifest(tmp_path / "engine"), tmp_path / "engine" / ONNX_FILE
    kernels = Compiler(flavour, NoProgress(), "plugin").kernels(
        ir.load(onnx), onnx, manifest.profiles
    )
    streams = {
        profile: [k.stream for k in kernels if k.profile == index and k.kind == "custom_layer"]
        for index, profile in enumerate(manifest.profiles)
    }
    assert streams == {"decode": [0, 0, 0, 0], "prefill": [1, 1, 1, 1]}


@pytest.mark.parametrize("kind", KINDS)
def test_random_codes_are_read_as_a_plan_takes_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_engines, "LAYERS", 1)
    shape = LayerShape(hidden=256, keys=64, inner=512)
    model = llama_engines.save_model(tmp_path / "model", shape)
    codes = with_random_codes(model, tmp_path / "codes", kind)
    config = BuildConfig(codes, tmp_path / "engine", ("all-linear",))
    linears = loaded(config, TENSORRT_RTX).codes.values()
    assert len(linears) == 7
    forms = {linear.format(config.quantize_level, "").format for linear in linears}
    assert forms == {kind}
    assert {linear.weight.x_scale is not None for linear in linears} == {kind == "fp8"}


@pytest.mark.parametrize("way", host_step.WAYS)
@pytest.mark.parametrize("logits", host_step.PEAKS)
def test_the_hosts_part_of_a_step_is_measured_from_delivery_to_delivery(
    way: str, logits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # of the deliveries alone
    monkeypatch.setattr(host_step, "perf_counter", lambda: next(clock) * 1e-3)
    monkeypatch.setattr(host_step, "thread_time", lambda: next(clock) * 1e-3)
    row = host_step.measure(2, way, logits, steps=3)
    assert row.name == f"2 rows, {way}, {logits}"
    assert row.sizes["steps"] == 3
    assert list(row.variants.values()) == pytest.approx([2, 2, 2, 2])  # two clocks at each


def test_all_rows_of_the_bench_are_given_a_token_at_every_step() -> None:
    receiver = host_step.TokenReceiver(2)
    found = host_step.random_logits(2, 0.0)
    engine = host_step.StubEngine(host_step._manifest(2), HostMemory(), found=found)
    scheduler = scheduler_of(engine, rows=2)
    for row in range(2):
        scheduler.submit([row], SamplingParams(temperature=0, max_tokens=4))
    with EngineLoop(scheduler, receiver.take):
        assert receiver.are_done.wait(60)
    assert len(receiver.times) == 4
    tokens = receiver.tokens.get()  # of the last step
    assert receiver.tokens.empty()
    assert [token.sequence_id for token in tokens] == [0, 1]
    assert [token.token_id for token in tokens] == engine.found.argmax(axis=1).tolist()
