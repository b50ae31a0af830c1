"""What the benchmarks on a CPU share: memory of a process, seconds, random adapters."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from conftest import TinyEngine
from kernels.emulator import BUILD
from support.eventually import eventually
from tokenizers import Tokenizer, models

from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.bench import adapter_load, cpu
from trt_lora.scripts.bench.gpu.layers.llama_manager import manager_of
from trt_lora.scripts.bench.gpu.layers.random_peft_adapter import write_random_adapter
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B
from trt_lora.scripts.measuring.process_memory import peak_resident_bytes, resident_bytes
from trt_lora.scripts.measuring.seconds import seconds_of

HELD = 64 << 20  # bytes
HOLD_AND_FREE = f"""
from trt_lora.scripts.measuring.process_memory import peak_resident_bytes, resident_bytes
held = b"x" * {HELD}
input()
del held
print(resident_bytes(), peak_resident_bytes())
"""


def test_memory_of_a_process_lies_below_its_peak_and_is_nothing_after_its_end() -> None:
    assert 0 < resident_bytes() <= peak_resident_bytes()
    # A process of its own: this one may have as much free, and take it again.
    command = [sys.executable, "-c", HOLD_AND_FREE]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        assert eventually(lambda: HELD < resident_bytes(child.pid) < 2 * HELD)
        printed, _ = child.communicate("go on\n")
    resident, peak = map(int, printed.split())
    assert 0 < resident < HELD < peak < 2 * HELD
    assert resident_bytes(child.pid) == 0


def test_a_call_takes_seconds_of_the_clock_and_of_processors() -> None:
    calls: list[int] = []
    wall, processors = seconds_of(lambda: calls.append(sum(range(10**6))))
    assert len(calls) == 1
    assert wall > 0
    assert processors > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_random_adapter_binds_every_linear_and_is_measured(tmp_path: Path, dtype: str) -> None:
    write_random_adapter(tmp_path / "adapter", rank=1, dtype=dtype, scale=2.0)
    manager = manager_of(HostMemory(), "float16")
    manager.load_weights("a", tmp_path / "adapter")
    assert manager.get_adapter_names() == ["a"]
    seconds = adapter_load.measure_time(tmp_path / "adapter", "float16")
    assert set(seconds) == {"ours", "load_file", "ours_cpu", "load_file_cpu"}


def test_a_measurement_in_a_process_of_its_own_prints_json(tmp_path: Path) -> None:
    cpu._in_process("adapter_load", "write", tmp_path / "adapter", 1, "float16", 1.0)
    peak = json.loads(cpu._in_process("adapter_load", "peak", tmp_path / "adapter", "float16"))
    assert peak["adapters"] == 1


def test_callbacks_of_every_node_of_a_layer_are_timed_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILD))
    nodes = json.loads(cpu._in_process("plugin_callbacks", 1))
    assert set(nodes) == set(LLAMA_3_8B.groups)
    for times in nodes.values():
        assert min(times[name] for name in ("on_shape_change", "enqueue", "both")) > 0


def test_the_hosts_part_of_a_decode_step_is_measured_with_every_binding_of_an_8b_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILD))
    measured = json.loads(cpu._in_process("decode_host"))
    assert measured["bindings"] == 448
    assert min(measured["step"], measured["switch"]) > 0


def test_a_cold_start_is_measured_from_a_moment_before_the_process(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    engine = shutil.copytree(tiny_engine.engine, tmp_path / "engine")
    Tokenizer(models.WordLevel({"word": 0}, unk_token="word")).save(str(engine / "tokenizer.json"))
    moment = time.monotonic()
    printed = cpu._in_process("cold_start", engine, tiny_engine.adapter, moment)
    measured = json.loads(printed)
    assert 0 < measured["first_token_seconds"] < time.monotonic() - moment
    assert measured["resident"] > measured["weights_and_cache"] > 0  # libraries are more


def test_every_script_of_a_measurement_is_there() -> None:
    text = Path(cpu.__file__).read_text()
    called = {part.split('"')[1] for part in text.split("_in_process(")[1:] if part[0] == '"'}
    assert called == {
        *("adapter_load", "strength", "plugin_callbacks", "decode_host"),
        *("build_stages", "compare_command", "cold_start", "peers.many_adapters"),
    }
    for name in called:
        assert Path(cpu.__file__).parent.joinpath(*name.split(".")).with_suffix(".py").is_file()
