"""The list of workloads: their order, their names, and that another process can run them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.scripts.bench import __main__ as bench
from trt_lora.scripts.bench.__main__ import ROOT, chosen, slug
from trt_lora.scripts.bench.workload_list import CPU, GPU
from trt_lora.scripts.measuring.child import imported
from trt_lora.scripts.measuring.worker import Workload


def names_of(workloads: list[Workload]) -> list[str]:
    return [each.name for each in workloads]


def test_workloads_are_chosen_by_name_and_kernels_are_compiled_first() -> None:
    plans = ["plan:tensorrt", "plan:tensorrt-rtx"]
    assert names_of(chosen(GPU, ["plan", "tests"])) == ["compilation", "tests", *plans]
    parts = names_of(chosen(GPU, ["correctness"]))
    assert parts[:2] == ["compilation", "correctness:decode"]
    assert len(parts) == 6
    assert names_of(chosen(CPU, ["host-step"])) == ["host-step"]
    assert chosen(CPU, None) == list(CPU)
    with pytest.raises(ConfigError, match=r"W2: unknown; choose from: beside-gemm, ceilings, comp"):
        chosen(GPU, ["W2"])


@pytest.mark.parametrize("workload", [*CPU, *GPU], ids=lambda workload: str(workload.name))
def test_every_workload_can_be_sent_to_another_process_and_is_there(workload: Workload) -> None:
    assert tuple(json.loads(json.dumps(workload.arguments))) == workload.arguments
    assert callable(imported(workload.place))


def test_a_machine_that_builds_no_models_can_run_the_gpus() -> None:
    code = (
        "import sys, trt_lora.scripts.bench.__main__ as _, trt_lora.scripts.bench.plan as _, "
        "trt_lora.scripts.bench.gpu.kernels as _; "
        "print({'onnx', 'onnx_ir', 'peft', 'transformers', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cuda_obstacle", lambda: "there is no driver")
    with pytest.raises(BackendError, match="no benchmark without an NVIDIA GPU: there is no dr"):
        bench.main(["gpu"])


def test_rows_go_where_they_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(bench, "_gpu", lambda: "cuda:0")
    monkeypatch.setattr(bench, "machine_of", lambda device: machine)
    workload = Workload("tests", "?", 1, "gpu.failing_workloads:good", (["first"],))
    monkeypatch.setitem(bench.WORKLOADS, "gpu", (workload,))
    output = tmp_path / "gpu.json"
    assert bench.main(["gpu", "--output", str(output), "--only", "tests"]) == 0
    written = json.loads(output.read_text())
    assert written["machine"] == machine
    assert written["workloads"]["tests"]["outcome"] == "done"
    assert bench.FOLDER == ROOT / "docs" / "benchmarks"
    assert bench.main(["gpu", "--output", str(tmp_path), "--only", "tests"]) == 0
    again = json.loads((tmp_path / "gpu-nvidia-h200.json").read_text())
    assert again["workloads"]["tests"]["outcome"] == "done"


def test_a_device_has_a_name_for_files() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
