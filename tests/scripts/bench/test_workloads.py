"""The GPU benchmark's workloads, as far as a CPU can run them: tiny sizes, emulated kernels."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernels import emulator
from support.fakes.cpu_device import TINY, CpuDevice
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import SUCCESS, Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import WIDTH, engine_directory
from support.fakes.tiny_static_engine import KEY, static_manifest

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime import Engine
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.tensorrt.inputs import select_profile
from trt_lora.runtime.manifest import ONNX_FILE, read_manifest
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.bench.gpu.layers import llama_engines
from trt_lora.scripts.bench.gpu.layers.decoder_layers import DecoderLayers
from trt_lora.scripts.bench.gpu.layers.lora_methods import TrtLoraKernels
from trt_lora.scripts.bench.gpu.layers.random_adapters import random_adapter
from trt_lora.scripts.bench.gpu.layers.timed_engine import timed_run
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B
from trt_lora.scripts.bench.gpu.roofline import adapter_bytes
from trt_lora.scripts.bench.gpu.session import Bench, Options
from trt_lora.scripts.bench.gpu.worker import Skipped
from trt_lora.scripts.bench.gpu.workloads import (
    adapter_load,
    adapter_switch,
    ceilings,
    decode_step,
    engine_step,
    lora_group,
    tensorrt_probe,
)
from trt_lora.scripts.bench.gpu.workloads.tensorrt_probe import Answer

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="there is no g++")


@pytest.fixture
def bench() -> Bench:
    """A model of two layers on the CPU."""
    return Bench(CpuDevice(), Options(rounds=1, warm_up=0, model=TINY, l2_bytes=1))


@needs_compiler
@pytest.mark.parametrize(("m", "rank"), [(1, 16), (12, 8)])
def test_every_method_computes_the_same_step(bench: Bench, m: int, rank: int) -> None:
    cell = decode_step.StepCell(m, rank)
    row = decode_step.measure(bench, bench.weights, cell)
    differences = {name: value for name, value in row.ratios.items() if "difference" in name}
    names = {name.split(" /")[0] for name in differences}
    assert names == {"ours", "ours_two_streams", "pair_add", "native_dynamic", "peft"}
    for name, value in differences.items():
        assert isinstance(value, float)
        assert value < 5e-3, name
    assert "left out" in row.notes["vllm"]
    expected = decode_step.decode_expectations(Options(), decode_step.FIRST)["m1 r16"]
    missing = {name for name in expected if "vllm" not in name} - set(row.ratios)
    assert not missing, "a prediction that no result stands beside"
    assert isinstance(bench.device, CpuDevice)
    # Two layers of four groups, once to compare, once to capture and once to time.
    assert bench.device.order.count("fork") == bench.device.order.count("join") == 2 * 4 * 3


@needs_compiler
def test_our_nodes_have_the_forms_that_the_builder_inserts(bench: Bench) -> None:
    device = bench.device
    assert isinstance(device, CpuDevice)
    decode_step.measure(bench, bench.weights, decode_step.StepCell(1, 8))
    forms = {(len(shape.sites), shape.has_addend) for shape in device.kernels.shapes}
    assert forms == {(3, False), (1, True), (2, False)}  # q k v; o and down; gate and up


@needs_compiler
def test_on_one_stream_nothing_is_forked(bench: Bench) -> None:
    assert isinstance(bench.device, CpuDevice)
    chain = DecoderLayers(bench.device, bench.model, bench.weights, 3)
    ours = bench.adapter(8).ours
    outputs = {}
    for streams in (1, 2):
        chain.run(TrtLoraKernels(bench.device, bench.model, ours, 3, streams=streams))
        outputs[streams] = list(bench.device.order)
    assert outputs[1] == []
    assert outputs[2] == ["fork", "join"] * 4 * bench.model.layers


@needs_compiler
def test_dummies_change_no_bit_of_a_step(bench: Bench) -> None:
    for row in decode_step.idle_rows(bench):
        assert row.ratios["ours / base, difference"] == 0.0
        assert set(decode_step.idle_expectations(Options())[row.name]) <= set(row.ratios)


@needs_compiler
def test_prefill_is_measured_on_the_first_layers(bench: Bench) -> None:
    names = list(decode_step.prefill_expectations(Options()))
    assert names[0] == "m512 r16"
    cell = decode_step.StepCell(16, 16)
    row = decode_step.measure(bench, decode_step.first_layers(bench.weights, 1), cell)
    assert row.sizes["layers"] == 1
    assert "ours_two_streams overhead, %" in row.ratios


@needs_compiler
def test_a_group_is_measured_beside_torch(bench: Bench) -> None:
    cell = lora_group.GroupCell("qkv", 8, 16)
    row = lora_group.measure(bench, cell)
    assert row.sizes["calls"] == 32
    difference = row.ratios["ours / addmm_, difference"]
    assert isinstance(difference, float)
    assert difference < 2e-3
    expected = lora_group.expectations(Options())
    assert set(expected["qkv m8 r16"]) <= set(row.ratios)
    assert "addmm / ours" in expected["o m512 r16"]
    assert len(expected) == 4 * (10 + 5 * 4)
    assert next(iter(expected)) == "gate_up m1 r16"


def test_layers_are_fewer_where_memory_is_short() -> None:
    device = CpuDevice()
    device.memory_bytes = 0
    assert Bench(device, Options(model=TINY)).model.layers == 1


@needs_compiler
def test_a_switch_is_measured_in_each_way(bench: Bench) -> None:
    shape = replace(LLAMA_3_8B, layers=1)  # the engine that is switched has Llama's shapes
    adapters = [random_adapter(bench.device, shape.groups, 1, 1)] * 2
    row = adapter_switch.on_the_host(bench, HostMemory(), adapters)
    assert row.sizes["bindings"] == 448
    names = list(adapter_switch.EXPECTATIONS)
    assert row.name == names[0]
    rest = [each.name for each in adapter_switch.graph_rows(bench)]
    assert [row.name, *rest] == names


def test_loading_is_measured_from_the_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_load, "RANKS", (1,))
    monkeypatch.setattr(adapter_load, "_PEAK_BYTES", 1 << 20)
    first, load = adapter_load.rows(bench, HostMemory())
    assert first.name == "pinned copy to the device"
    assert load.sizes["bytes"] == adapter_bytes(1)
    assert set(adapter_load.expectations()["r1"]) <= set(load.ratios)


def test_ceilings_are_measured(bench: Bench) -> None:
    node, copy = ceilings.rows(replace(bench, device=small(bench.device)))
    assert set(ceilings.EXPECTATIONS[node.name]) == set(node.ratios)
    assert set(ceilings.EXPECTATIONS[copy.name]) == set(copy.ratios)


def small(device: Any) -> Any:
    device.memory_bytes = 4 << 20
    return device


def test_where_no_tensorrt_runs_the_engine_says_what_stands_for_it() -> None:
    answer = Answer("tensorrt-rtx", "1.7.1", "built", reason="the plan was refused")
    with pytest.raises(Skipped, match=r"came to 'built': the plan was refused.*replay"):
        next(engine_step.rows(lambda: [answer]))
    rows = list(tensorrt_probe.rows(lambda: [answer]))
    assert rows[0].notes["runs"] is False


# ---- a decode step inside an engine


class TimedCuda(FakeCuda):
    """A fake CUDA whose events lie a quarter of a millisecond apart."""

    def cudaEventElapsedTime(  # noqa: N802 # CUDA's name
        self, start: Any, end: Any
    ) -> tuple[Status, float]:
        """Return the milliseconds between two events that have passed."""
        assert not self.pending(start)
        assert not self.pending(end)
        return SUCCESS, 0.25


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedCuda]:
    """A GPU on which every test must leave nothing behind."""
    fake = TimedCuda()
    fake.install(monkeypatch)
    yield fake
    fake.check()


@pytest.fixture
def tensorrt_engine(cuda: TimedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """The fake TensorRT's tiny engine, not entered."""
    trt = FakeTensorRT(cuda)
    trt.install(monkeypatch)
    trt.manifest = static_manifest()
    return TensorRTEngine(engine_directory(tmp_path / "engine", trt.manifest), trt.manifest)


def test_a_decode_step_has_the_cache_and_the_profile_that_it_says(tensorrt_engine: Engine) -> None:
    with tensorrt_engine as engine:
        inputs = engine_step.decode_inputs(engine, m=2, rank=3, length=5)
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        assert shapes[KEY] == (2, 1, engine.manifest.max_seq_len, WIDTH)
        assert inputs["lengths"].numpy().tolist() == [5, 5]
        assert inputs[KEY].numpy().all()
        assert list(engine.manifest.profiles)[select_profile(engine.manifest, shapes)] == "decode"
        del inputs


def test_a_cache_as_long_as_the_engine_is_refused(tensorrt_engine: Engine) -> None:
    with tensorrt_engine as engine, pytest.raises(ModelError, match="allows 15"):
        engine_step.decode_inputs(engine, m=1, rank=1, length=16)


def test_tensorrts_own_time_lies_between_events_around_graph_and_enqueue(
    tensorrt_engine: Engine, cuda: TimedCuda
) -> None:
    with tensorrt_engine as engine:
        inputs = engine_step.decode_inputs(engine, m=1, rank=3, length=5)
        with timed_run(engine.directory, inputs) as (run, profile):
            assert (profile, run.has_graph) == ("decode", True)
            before = len(cuda.names())
            assert (run.enqueue_us(), run.graph_us()) == (250.0, 250.0)
            calls = [name for name in cuda.names()[before:] if "Destroy" not in name]
        del inputs
    create, record, wait = "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamSynchronize"
    enqueued = [create, create, record, record, wait]
    assert calls == [*enqueued, create, create, record, "cudaGraphLaunch", record, wait]


def test_a_row_tells_tensorrts_time_from_pythons(tensorrt_engine: Engine) -> None:
    with tensorrt_engine as engine:
        engines: dict[str, Engine] = {}
        engines |= dict.fromkeys(("plugin", "native", "base"), engine)
        row = engine_step.measure(engines, m=1, rank=2, rounds=1, length=5)
    for name in engines:
        assert row.variants[f"{name} graph, us"] == row.variants[f"{name} enqueue, us"] == 250.0
        assert row.notes[name] == {"profile": "decode", "captured": True}
        assert f"{name} step, us" in row.variants
        assert f"{name} step / graph" in row.ratios
    assert set(engine_step.expectations()["m1 r16"]) <= set(row.ratios)
    assert row.sizes["cache, tokens"] == 5


@pytest.mark.slow
def test_a_plan_decodes_on_one_stream_as_ours_does_and_prefills_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of the real sizes."""
    flavour = flavour_named("tensorrt-rtx")
    if not flavour.installed:
        pytest.skip("TensorRT-RTX is not installed")
    monkeypatch.setattr(llama_engines, "LAYERS", 1)
    model = llama_engines.save_model(tmp_path / "model", LLAMA_3_8B)
    options: dict[str, Any] = {"flavour": "none", "lora_plugin": "plugin", "dtype": "float16"}
    options |= {"max_input_len": llama_engines.MAX_PROMPT, "max_seq_len": llama_engines.MAX_TOKENS}
    build_engine(BuildConfig(model, tmp_path / "engine", ("all-linear",), **options))
    manifest, onnx = read_manifest(tmp_path / "engine"), tmp_path / "engine" / ONNX_FILE
    kernels = Compiler(flavour, NoProgress(), "plugin").kernels(
        onnx.read_bytes(), onnx, manifest.profiles
    )
    streams = {
        profile: [k.stream for k in kernels if k.profile == index and k.kind == "custom_layer"]
        for index, profile in enumerate(manifest.profiles)
    }
    assert streams == {"decode": [0, 0, 0, 0], "prefill": [1, 1, 1, 1]}
    assert decode_step.STREAMS["ours"] == 1
