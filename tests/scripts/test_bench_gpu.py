"""The GPU benchmark, as far as a CPU can run it: sizes are tiny, our kernels are emulated."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.cpu_device import ANYWHERE, H200, TINY, CpuDevice
from kernels import emulator

from trt_lora.plugins.compile_kernels import compile_source, source
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.group import GroupShape, SiteShape
from trt_lora.plugins.launch import Launch, plan_launches
from trt_lora.runtime.memory import HostMemory
from trt_lora.scripts import bench_gpu
from trt_lora.scripts.gpu import (
    checks,
    engine_workload,
    kernel_workload,
    load_workload,
    step_workload,
    switch_workload,
)
from trt_lora.scripts.gpu import device as gpu_device
from trt_lora.scripts.gpu import glue as gpu_glue
from trt_lora.scripts.gpu.adapters import random_adapter
from trt_lora.scripts.gpu.bench import Bench, Options
from trt_lora.scripts.gpu.glue import ELEMENTS, TEXT, entry_points, gated_group, norm_group
from trt_lora.scripts.gpu.machine import slug
from trt_lora.scripts.gpu.results import Expectation, Report, Row
from trt_lora.scripts.gpu.roofline import (
    SCHEMES,
    adapter_bytes,
    bytes_us,
    group_us,
    linear_us,
    overhead_percent,
    step_us,
)
from trt_lora.scripts.gpu.run import Runner, Skipped, Workload, row_lines
from trt_lora.scripts.gpu.shapes import LLAMA_3_8B
from trt_lora.scripts.gpu.tensorrt import Answer
from trt_lora.scripts.gpu.timing import Spread, alternate
from trt_lora.scripts.gpu.vllm import FILES, load_vllm
from trt_lora.scripts.gpu.workloads import gpu_workloads

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="there is no g++")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def bench() -> Bench:
    """A model of two layers on the CPU."""
    return Bench(CpuDevice(), Options(rounds=1, warm_up=0, model=TINY, l2_bytes=1))


# ---- predictions, against the tables of performance.md, section 3


def test_predictions_are_those_of_the_report() -> None:
    assert adapter_bytes(16) / 1e6 == pytest.approx(84, abs=0.5)
    assert [step_us(m) / 1e3 for m in (1, 32, 512, 2048)] == pytest.approx(
        [3.49, 3.53, 9.29, 36.43], abs=0.005
    )
    assert linear_us(LLAMA_3_8B.groups["qkv"][0], 1) == pytest.approx(7.81, abs=0.005)
    q = LLAMA_3_8B.groups["qkv"][:1]
    assert group_us(q, 32, 64, SCHEMES["ours"]) == pytest.approx(0.43, abs=0.005)
    down = LLAMA_3_8B.groups["down"]
    assert group_us(down, 2048, 256, SCHEMES["ours"]) == pytest.approx(24.47, abs=0.005)


@pytest.mark.parametrize(
    ("scheme", "m", "rank", "us"),
    [
        ("ours", 1, 16, 21),
        ("ours", 512, 64, 936),
        ("native_static", 512, 16, 1629),
        ("native_dynamic", 1, 16, 62),
        ("native_dynamic", 32, 256, 1039),
    ],
)
def test_bytes_of_a_step_are_those_of_the_report(scheme: str, m: int, rank: int, us: int) -> None:
    assert bytes_us(m, rank, SCHEMES[scheme]) == pytest.approx(us, abs=0.6)


@pytest.mark.parametrize(
    ("scheme", "m", "rank", "low", "high"),
    [
        ("ours", 1, 16, 4.7, 7.5),
        ("ours_one_stream", 8, 16, 6.4, 10.1),
        ("native_static", 1, 16, 15.8, 25.9),
        ("native_dynamic", 1, 16, 36.1, 59.0),
        ("native_dynamic", 64, 256, 65.5, 87.9),
    ],
)
def test_overheads_are_those_of_the_report(
    scheme: str, m: int, rank: int, low: float, high: float
) -> None:
    assert overhead_percent(m, rank, SCHEMES[scheme]) == pytest.approx((low, high), abs=0.06)


def test_a_node_is_predicted_for_every_launch_that_is_planned() -> None:
    def expected(name: str) -> Expectation:
        return step_workload.decode_expectations(Options())[name]["ours overhead, %"]

    for m, rank in ((1, 16), (8, 16), (64, 256)):
        scheme = replace(SCHEMES["ours"], nodes=launches(m, rank))
        found = expected(f"m{m} r{rank}")
        assert (found.low, found.high) == pytest.approx(overhead_percent(m, rank, scheme))
    assert expected("m1 r16").at_most == expected("m32 r16").at_most == 8.0
    assert expected("m64 r16").at_most is None


def launches(m: int, rank: int) -> int:
    """Of a layer, but for gate and up."""
    groups = [group for name, group in LLAMA_3_8B.groups.items() if name != "gate_up"]
    shapes = [
        GroupShape(m, group[0].k, tuple(SiteShape(i.n, rank) for i in group), "float16", True)
        for group in groups
    ]
    return sum(len(plan_launches(shape, H200)) for shape in shapes)


# ---- timing


def test_versions_alternate_and_ratios_pair_what_ran_together() -> None:
    orders: list[list[str]] = []

    def sample(order: Sequence[str]) -> list[float]:
        orders.append(list(order))
        slow = 1.0 + len(orders)  # the clock drifts, for both alike
        return [slow * {"a": 10.0, "b": 15.0}[name] for name in order]

    times = alternate(["a", "b"], sample, rounds=4)
    assert orders == [["a", "b"], ["b", "a"], ["a", "b"], ["b", "a"]]
    assert times.ratio("b", "a") == Spread(1.5, 1.5, 1.5)
    assert times.overhead_percent("b", "a").median == pytest.approx(50)
    assert times.median("a") == 35.0


def test_a_spread_is_the_middle_half_of_the_rounds() -> None:
    values = iter([1.0, 2.0, 3.0, 4.0, 100.0])
    times = alternate(["a"], lambda order: [next(values)], rounds=5)
    assert times.samples["a"] == [1.0, 2.0, 3.0, 4.0, 100.0]
    assert times.ratio("a", "a") == Spread(1.0, 1.0, 1.0)


# ---- results


def test_a_row_holds_prediction_gap_and_target_beside_the_result() -> None:
    row = Row("x", {"m": 1}, {"ours_us": 2.0}, {"overhead, %": Spread(9.5, 9.0, 9.75), "ok": 1.0})
    expected = {"overhead, %": Expectation(4.7, 7.5, at_most=8.0), "ok": Expectation(at_least=1.0)}
    written = row.to_json(expected)
    assert written["variants"] == {"ours_us": 2.0}
    assert written["ratios"]["overhead, %"] == {
        "value": 9.5,
        "spread": [9.0, 9.75],
        "prediction": [4.7, 7.5],
        "gap": 2.0,
        "target": "at most 8",
        "met": False,
    }
    assert written["ratios"]["ok"] == {"value": 1.0, "target": "at least 1", "met": True}
    text = "\n".join(row_lines(written))
    assert "predicted 4.7 to 7.5, gap 2; target at most 8: MISSED" in text


def test_what_is_no_number_meets_no_target_and_is_valid_json() -> None:
    row = Row("x", {}, ratios={"d": float("nan")}).to_json({"d": Expectation(0, 1, at_most=0.1)})
    assert row["ratios"]["d"]["met"] is False
    assert json.loads(json.dumps(row, allow_nan=False))["ratios"]["d"]["value"] is None
    assert "d = NaN" in "\n".join(row_lines(row))


# ---- the run


class Clock:
    """A clock that the workloads move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def runner(folder: Path, clock: Clock, seconds: float = 100.0) -> Runner:
    return Runner(Report(folder / "gpu.json"), seconds, clock, tell=lambda line: None)


def workload(name: str, clock: Clock, rows: int, seconds: float, weight: float = 1) -> Workload:
    def measure() -> Iterator[Row]:
        for index in range(rows):
            clock.now += seconds
            yield Row(f"r{index}", {})

    expected: dict[str, dict[str, Expectation]] = {f"r{index}": {} for index in range(rows)}
    return Workload(name, "?", weight, measure, expected)


def test_a_workload_stops_at_its_share_and_time_saved_goes_to_the_others(tmp_path: Path) -> None:
    clock = Clock()
    runs = runner(tmp_path, clock)
    quick, slow = workload("quick", clock, 1, 2.0), workload("slow", clock, 50, 10.0)
    assert runs.run([quick, slow, workload("last", clock, 1, 1.0)])
    written = json.loads((tmp_path / "gpu.json").read_text())["workloads"]
    assert written["quick"]["status"] == written["last"]["status"] == "done"
    assert written["slow"]["status"] == "stopped at its deadline"
    assert len(written["slow"]["rows"]) == 5  # 49 s of the 98 that are left
    assert written["slow"]["not_reached"] == [f"r{index}" for index in range(5, 50)]


def test_a_failure_and_a_skip_are_written_down_and_the_run_goes_on(tmp_path: Path) -> None:
    clock = Clock()

    def fail() -> Iterator[Row]:
        yield Row("r0", {})
        raise RuntimeError("CUDA error: misaligned address")

    def skip() -> Iterator[Row]:
        raise Skipped("not built yet: slots mode")

    workloads = [Workload("W1", "?", 1, fail), Workload("W5", "?", 1, skip)]
    assert not runner(tmp_path, clock).run([*workloads, workload("W6", clock, 1, 1.0)])
    written = json.loads((tmp_path / "gpu.json").read_text())["workloads"]
    assert written["W1"]["status"] == "failed"
    assert "misaligned address" in written["W1"]["error"]
    assert len(written["W1"]["rows"]) == 1
    assert (written["W5"]["status"], written["W5"]["reason"]) == (
        "skipped",
        "not built yet: slots mode",
    )
    assert written["W6"]["status"] == "done"


def test_predictions_are_in_the_file_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    seen: list[Any] = []

    def look() -> Iterator[Row]:
        seen.append(json.loads(file.read_text())["predictions"])
        yield Row("m1", {}, ratios={"us": 3.0})

    expected = {"m1": {"us": Expectation(1.0, 2.0)}}
    Runner(Report(file), 10, Clock(), lambda line: None).run(
        [Workload("W", "?", 1, look, expected)]
    )
    assert seen == [{"W": {"m1": {"us": {"prediction": [1.0, 2.0]}}}}]


def test_workloads_are_chosen_by_name() -> None:
    workloads = gpu_workloads(Options(model=TINY))
    names = [each.name for each in workloads]
    assert names == [
        *("ceilings", "tensorrt", "tests"),
        *("W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W2c"),
    ]
    assert [each.name for each in bench_gpu.chosen(workloads, ["W2", "W1"])] == ["W1", "W2"]
    assert bench_gpu.chosen(workloads, None) == workloads
    with pytest.raises(ConfigError, match="W9: unknown; choose from: ceilings"):
        bench_gpu.chosen(workloads, ["W9"])
    with pytest.raises(Skipped, match="slots mode"):
        next(workload.name for workload in workloads if workload.name == "W5" and workload.rows())


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "cuda_obstacle", lambda: "there is no NVIDIA GPU")
    assert bench_gpu.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err == "no benchmark without an NVIDIA GPU: there is no NVIDIA GPU\n"
    assert not captured.out


def test_a_machine_that_builds_no_models_can_run_it() -> None:
    code = (
        "import sys, trt_lora.scripts.gpu.workloads as _; "
        "print({'onnx', 'onnx_ir', 'peft', 'transformers', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_device_has_a_name_for_files() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


# ---- the workloads on the CPU


@needs_compiler
@pytest.mark.parametrize(("m", "rank"), [(1, 16), (12, 8)])
def test_every_contestant_computes_the_same_step(bench: Bench, m: int, rank: int) -> None:
    cell = step_workload.Cell(m, rank)
    row = step_workload.measure(bench, bench.weights, cell)
    differences = {name: value for name, value in row.ratios.items() if "difference" in name}
    names = {name.split(" /")[0] for name in differences}
    assert names == {"ours", "ours_one_stream", "pair_add", "native_dynamic", "peft"}
    for name, value in differences.items():
        assert isinstance(value, float)
        assert value < 5e-3, name
    assert "left out" in row.notes["vllm"]
    expected = step_workload.decode_expectations(Options())["m1 r16"]
    missing = {name for name in expected if "vllm" not in name} - set(row.ratios)
    assert not missing, "a prediction that no result stands beside"
    assert isinstance(bench.device, CpuDevice)
    assert bench.device.order.count("fork") == bench.device.order.count("join") > 0


@needs_compiler
def test_dummies_change_no_bit_of_a_step(bench: Bench) -> None:
    for row in step_workload.idle_rows(bench):
        assert row.ratios["idle / base, difference"] == 0.0
        assert set(step_workload.idle_expectations(Options())[row.name]) <= set(row.ratios)


@needs_compiler
def test_prefill_is_measured_on_the_first_layers(bench: Bench) -> None:
    names = list(step_workload.prefill_expectations(Options()))
    assert names[0] == "m512 r16"
    row = step_workload.measure(
        bench, step_workload.first_layers(bench.weights, 1), step_workload.Cell(16, 16)
    )
    assert row.sizes["layers"] == 1


@needs_compiler
def test_a_group_is_measured_beside_torch(bench: Bench) -> None:
    cell = kernel_workload.Cell("qkv", 8, 16)
    row = kernel_workload.measure(bench, cell)
    assert row.sizes["calls"] == 32
    difference = row.ratios["ours / addmm_, difference"]
    assert isinstance(difference, float)
    assert difference < 2e-3
    expected = kernel_workload.expectations(Options())
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
    row = switch_workload.on_the_host(bench, HostMemory(), adapters)
    assert row.sizes["bindings"] == 448
    names = list(switch_workload.EXPECTATIONS)
    assert row.name == names[0]
    rest = [each.name for each in switch_workload.graph_rows(bench)]
    assert [row.name, *rest] == names


def test_loading_is_measured_from_the_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_workload, "RANKS", (1,))
    monkeypatch.setattr(load_workload, "_PEAK_BYTES", 1 << 20)
    first, load = load_workload.rows(bench, HostMemory())
    assert first.name == "pinned copy to the device"
    assert load.sizes["bytes"] == adapter_bytes(1)
    assert set(load_workload.expectations()["r1"]) <= set(load.ratios)


def test_ceilings_are_measured(bench: Bench) -> None:
    node, copy = checks.ceiling_rows(replace(bench, device=small(bench.device)))
    assert set(checks.CEILINGS[node.name]) == set(node.ratios)
    assert set(checks.CEILINGS[copy.name]) == set(copy.ratios)


def small(device: Any) -> Any:
    device.memory_bytes = 4 << 20
    return device


def test_where_no_tensorrt_runs_the_engine_says_what_stands_for_it() -> None:
    answer = Answer("tensorrt-rtx", "1.7.1", "built", reason="the plan was refused")
    with pytest.raises(Skipped, match=r"came to 'built': the plan was refused.*replay"):
        next(engine_workload.rows([answer]))
    rows = list(checks.tensorrt_rows(lambda: [answer]))
    assert rows[0].notes["runs"] is False


# ---- correctness

SUITE = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("error", [0.25, 0.5])
def test_kernel(record_property, error):
    record_property("family", "fused_float32_1")
    record_property("worst element / allowed", error)

def test_other():
    assert {right}
"""


def test_the_tests_of_a_family_of_kernels_are_one_row(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE.format(right=True))
    suite, family = checks.suite_rows(folder=tmp_path)
    assert suite.notes == {"tests": 3, "wrong": 0, "skipped": 0}
    assert (family.name, family.sizes) == ("fused_float32_1", {"calls": 2})
    assert family.ratios == {"worst element / allowed": 0.5}


def test_a_wrong_test_is_a_wrong_result(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE.format(right=False))
    with pytest.raises(checks.WrongResultError, match="1 failed, 2 passed"):
        list(checks.suite_rows(folder=tmp_path))


# ---- the kernels between the products


@pytest.mark.parametrize("element", ELEMENTS.values())
@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
def test_glue_compiles_without_a_gpu(element: str, arch: str) -> None:
    options = (f"--gpu-architecture={arch}", "--std=c++17")
    ptx = compile_source(source() + TEXT + entry_points(element), options).decode()
    for name in ("rms_norm", "gated", "nothing", "nothing_in_clusters"):
        assert f".entry {name}(" in ptx
    assert (".explicitcluster" in ptx) == (arch == "compute_90")


@needs_compiler
def test_glue_computes_norm_and_gate() -> None:
    text = "#include <cmath>\n" + emulator.kernel_text() + TEXT + entry_points("Float16")
    library = emulator.build(text, ())
    device = CpuDevice()
    x, weight, out = device.random(3, 72), device.random(72), device.empty(3, 72)
    launch = Launch("rms_norm", (3, 1, 1), 256, 1, 32, 1)
    emulator.emulate(library, launch, norm_group(x, weight, out), [ANYWHERE], 0)
    torch.testing.assert_close(out, device.glue.rms_norm(x, weight, device.empty(3, 72)))
    y, deltas = device.random(3, 2 * 2056), [device.random(3, 2056) for _ in range(2)]
    for some in ((), deltas):
        out = device.empty(3, 2056)
        group = gated_group(y.chunk(2, dim=1), some, out)
        launch = Launch("gated", (2, 3, 1), 256, 1, 32, 1)
        emulator.emulate(library, launch, group, [ANYWHERE], 0)
        expected = device.glue.gated(y.chunk(2, dim=1), some, device.empty(3, 2056))
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


# ---- the GPU's own calls, against a recorder


class Recorder:
    """Stands for torch.cuda: writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return self

        return called

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def recorded_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    """A CudaDevice that was never made."""
    cuda = Recorder()
    monkeypatch.setattr(gpu_device, "_CUDA", cuda)
    monkeypatch.setattr(gpu_device, "_count_nodes", lambda graph: 7)
    device: Any = gpu_device.CudaDevice.__new__(gpu_device.CudaDevice)
    vars(device).update(_main=cuda, _side=cuda)
    return device, cuda


def test_a_capture_is_warmed_up_and_closed_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, cuda = recorded_device(monkeypatch)
    assert device.capture(lambda: cuda.calls.append("run")).nodes == 7
    assert [call for call in cuda.calls if call != "synchronize"] == [
        *("stream", "run", "CUDAGraph", "capture_begin", "run", "capture_end", "instantiate")
    ]
    cuda.calls.clear()
    runs = iter([None])
    with pytest.raises(StopIteration):
        device.capture(lambda: next(runs))
    assert cuda.calls[-1] == "capture_end"
    assert gc.isenabled()


def test_replays_are_timed_between_events_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = recorded_device(monkeypatch)
    vars(cuda)["elapsed_time"] = lambda mark: 0.25
    replay = gpu_device.CudaReplay(cuda, None)
    assert device.times_us([replay, replay]) == [250.0, 250.0]
    assert cuda.calls[-6:] == ["record", "replay", "record", "replay", "record", "synchronize"]


def test_a_launch_hands_the_driver_grid_block_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu_glue, "_driver", lambda *args: launched.append(args))
    current = type("Stream", (), {"cuda_stream": 42})
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    glue: Any = gpu_glue.CudaGlue.__new__(gpu_glue.CudaGlue)
    glue._function = lambda name: name
    device = CpuDevice()
    out = device.empty(3, 4104)
    glue.gated(device.random(3, 8208).chunk(2, dim=1), (), out)
    name, function, *shape = launched[0][:-2]
    assert (name, function, shape) == (
        "cuLaunchKernel",
        "gated",
        [3, 3, 1, 256, 1, 1, 32, 42],
    )
    glue.nothing(clusters=True)
    assert launched[1][1:3] == ("nothing_in_clusters", 8)


# ---- vLLM


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks lora_shrink_op\.py.*vllm/lora/ops/triton_ops"):
        load_vllm(tmp_path)


@pytest.fixture
def vllm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files with the imports and the signatures of vLLM's, computing by torch."""
    folder = Path(__file__).parents[1] / "gpu" / "like_vllm"
    for name in FILES:
        (tmp_path / name).write_text((folder / f"{name}.txt").read_text())
    before = dict(sys.modules)
    fake = type(sys)("triton")
    vars(fake).update(next_power_of_2=lambda n: n, cdiv=lambda a, b: -(-a // b))
    fake.language = type(sys)("triton.language")  # type: ignore[attr-defined]
    for module in (fake, fake.language):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if name.startswith("vllm"):
            del sys.modules[name]


@needs_compiler
def test_vllm_takes_part_where_its_folder_is_given(vllm_folder: Path) -> None:
    bench = Bench(CpuDevice(), Options(rounds=1, warm_up=0, model=TINY, vllm=vllm_folder))
    row = step_workload.measure(bench, bench.weights, step_workload.Cell(3, 8))
    difference = row.ratios["vllm / addmm, difference"]
    assert isinstance(difference, float)
    assert difference < 5e-3
    assert "vllm overhead / ours overhead" in row.ratios or "ours overhead, %" in row.ratios


def test_vllm_that_asks_for_more_is_refused(vllm_folder: Path) -> None:
    file = vllm_folder / "lora_shrink_op.py"
    file.write_text(file.read_text().replace("scaling,", "scaling, workspace,"))
    with pytest.raises(ConfigError, match="takes workspace, which is not known here"):
        load_vllm(vllm_folder)


def test_vllm_that_imports_more_is_refused(vllm_folder: Path) -> None:
    file = vllm_folder / "lora_expand_op.py"
    file.write_text("from vllm.attention import backend\n" + file.read_text())
    with pytest.raises(ConfigError, match=r"No module named 'vllm\.attention'"):
        load_vllm(vllm_folder)
