"""What the GPU benchmark's steps are made of: kernels between products, streams, vLLM's kernels."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import emulator
from support.fakes.cpu_device import ANYWHERE, TINY, CpuDevice

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.kernels.launch_plan import Launch
from trt_lora.plugins.kernels.launcher import KernelGroup
from trt_lora.plugins.kernels.nvrtc import compile_source, source
from trt_lora.scripts.bench.gpu import device as gpu_device
from trt_lora.scripts.bench.gpu import elementwise_kernels as gpu_glue
from trt_lora.scripts.bench.gpu.elementwise_kernels import (
    ELEMENTS,
    TEXT,
    entry_points,
    gated_group,
    norm_group,
    split_group,
)
from trt_lora.scripts.bench.gpu.layers.decoder_layers import columns
from trt_lora.scripts.bench.gpu.layers.vllm_kernels import load_vllm
from trt_lora.scripts.bench.gpu.session import Bench, Options
from trt_lora.scripts.bench.gpu.workloads import decode_step

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="there is no g++")


# ---- the kernels between the products


@pytest.mark.parametrize("element", ELEMENTS.values())
@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
def test_the_kernels_between_products_compile_without_a_gpu(element: str, arch: str) -> None:
    options = (f"--gpu-architecture={arch}", "--std=c++17")
    ptx = compile_source(source() + TEXT + entry_points(element), options).decode()
    for name in ("rms_norm", "split", "gated", "nothing", "nothing_in_clusters"):
        assert f".entry {name}(" in ptx
    assert (".explicitcluster" in ptx) == (arch == "compute_90")


@pytest.fixture(scope="module")
def library() -> Any:
    """The kernels between the products, for this CPU."""
    text = "#include <cmath>\n" + emulator.kernel_text() + TEXT + entry_points("Float16")
    return emulator.build(text, ())


def emulate(library: Any, kernel: str, group: KernelGroup, *grid: int) -> None:
    launch = Launch(kernel, (*grid, 1), 256, 1, 32, 1)  # type: ignore[arg-type] # two axes
    emulator.emulate(library, launch, group, [ANYWHERE])


@needs_compiler
@pytest.mark.parametrize("has_product", [False, True])
def test_a_norm_adds_the_product_to_the_residual(library: Any, has_product: bool) -> None:
    device = CpuDevice()
    residual, product, weight = device.random(3, 72), device.random(3, 72), device.random(72)
    added = product if has_product else None
    again, out, expected = residual.clone(), device.empty(3, 72), device.empty(3, 72)
    emulate(library, "rms_norm", norm_group(residual, added, weight, out), 3, 1)
    device.elementwise.rms_norm(again, added, weight, expected)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(residual, again)
    assert not torch.equal(residual, product)


@needs_compiler
@pytest.mark.parametrize("has_deltas", [False, True])
def test_a_split_adds_the_deltas(library: Any, has_deltas: bool) -> None:
    device = CpuDevice()
    widths = (2056, 16, 16)
    y = columns(device.random(3, sum(widths)), widths)
    deltas = [device.random(3, n) for n in widths] if has_deltas else []
    outs, expected = ([device.empty(3, n) for n in widths] for _ in range(2))
    emulate(library, "split", split_group(y, deltas, outs), 2, 3)
    device.elementwise.split(y, deltas, expected)
    for out, each in zip(outs, expected, strict=True):
        assert torch.equal(out, each)


@needs_compiler
def test_a_gate_adds_the_deltas(library: Any) -> None:
    device = CpuDevice()
    y, deltas = device.random(3, 2 * 2056), [device.random(3, 2056) for _ in range(2)]
    for some in ((), deltas):
        out = device.empty(3, 2056)
        emulate(library, "gated", gated_group(y.chunk(2, dim=1), some, out), 2, 3)
        expected = device.elementwise.gated(y.chunk(2, dim=1), some, device.empty(3, 2056))
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
    monkeypatch.setattr(gpu_glue, "checked", lambda *args: launched.append(args[1:]))
    current = type("Stream", (), {"cuda_stream": 42})
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    elementwise: Any = gpu_glue.CudaElementwiseKernels.__new__(gpu_glue.CudaElementwiseKernels)
    elementwise._function = lambda name: name
    device = CpuDevice()
    out = device.empty(3, 4104)
    elementwise.gated(device.random(3, 8208).chunk(2, dim=1), (), out)
    name, function, *shape = launched[0][:-2]
    assert (name, function, shape) == (
        "cuLaunchKernel",
        "gated",
        [3, 3, 1, 256, 1, 1, 32, 42],
    )
    elementwise.nothing(clusters=True)
    assert launched[1][1:3] == ("nothing_in_clusters", 8)


# ---- vLLM


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks lora_shrink_op\.py.*vllm/lora/ops/triton_ops"):
        load_vllm(tmp_path)


@needs_compiler
def test_vllm_takes_part_where_its_folder_is_given(vllm_folder: Path) -> None:
    bench = Bench(CpuDevice(), Options(rounds=1, warm_up=0, model=TINY, vllm=vllm_folder))
    row = decode_step.measure(bench, bench.weights, decode_step.StepCell(3, 8))
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
