"""Compiling with the real TensorRT-RTX builder, which needs no GPU."""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from conftest import TinyEngine
from support.eventually import eventually
from support.fakes.fake_cuda import FakeCuda
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.compile import Compiler, _run
from trt_lora.plugins.errors import BackendError, ModelError
from trt_lora.plugins.tensorrt.flavour import TENSORRT, TENSORRT_RTX, Flavour
from trt_lora.plugins.tensorrt.plugin_registry import register_plugins
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import Range

trt: Any = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")


class Recorder(NoProgress):
    """Keeps what a build says, and can interrupt it."""

    def __init__(self, *, interrupt: signal.Signals | None = None) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.steps: list[tuple[int, int]] = []
        self._interrupt = interrupt

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def advance(self, done: int, total: int) -> None:
        self.steps.append((done, total))
        if self._interrupt is not None:
            number, self._interrupt = self._interrupt, None
            _thread.interrupt_main(number)  # what Ctrl-C and `kill` do


@pytest.mark.slow
def test_a_build_shows_its_stages_and_steps_and_makes_a_plan(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    recorder = Recorder()
    config = tiny_config(
        tiny_engine.model,
        tmp_path / "engine",
        flavour="tensorrt-rtx",
        timing_cache=tmp_path / "cache",
    )
    manifest = quick_build(config, recorder)
    assert recorder.stages == [
        *("check", "load", "export", "insert", "save", "compile", "describe", "try"),
    ]
    done, total = recorder.steps[-1]
    assert 0 < done <= total
    assert manifest.files["engine.plan"].size_bytes > 0
    assert manifest.versions["tensorrt-rtx"] == trt.__version__
    assert recorder.notes[0].startswith("--timing-cache has no effect: tensorrt-rtx")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_compilation_and_leaves_nothing(
    number: signal.Signals, tiny_engine: TinyEngine, tmp_path: Path, signals_work: None
) -> None:
    config = tiny_config(tiny_engine.model, tmp_path / "engine", flavour="tensorrt-rtx")
    recorder = Recorder(interrupt=number)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        quick_build(config, recorder)
    assert recorder.stages[-1] == "compile"
    assert list(tmp_path.iterdir()) == []
    assert not building()


def test_ctrl_c_before_the_compilation_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def started_then_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", started_then_interrupted)
    calls: list[None] = []
    with pytest.raises(KeyboardInterrupt):
        _run(lambda: calls.append(None), threading.Event())
    assert eventually(lambda: not building())
    assert calls == []


def building() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tensorrt-build"]


@pytest.fixture
def signals_work() -> Iterator[None]:
    """A test run in a shell's background has Ctrl-C switched off; commands handle SIGTERM."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


def compile_tiny(engine: Path, plan: Path, profiles: Any) -> None:
    """Compile the tiny engine's ONNX file with profiles of our own."""
    Compiler(TENSORRT_RTX, NoProgress(), lora_plugin="plugin").compile(
        engine / "model.onnx", plan, profiles
    )


def test_profiles_for_other_inputs_are_refused(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    profiles = {"decode": {"input_ids": Range((1, 1), (1, 1), (1, 1))}}
    with pytest.raises(ModelError, match=r"model\.onnx has other inputs in tensorrt-rtx: bound"):
        compile_tiny(tiny_engine.engine, tmp_path / "plan", profiles)


IGNORES_LENGTHS = """
<ir_version: 10, opset_import: ["" : 24]>
g (float16[batch, 2, 1, 16] q, float16[batch, 2, 16, 16] k, float16[batch, 2, 16, 16] v,
   int64[batch] filled) => (float16[batch, 2, 1, 16] y) {
  y = Attention<scale = 0.25>(q, k, v, , , , filled)
}
"""


def test_an_input_that_tensorrt_ignores_is_refused(tmp_path: Path) -> None:
    model = ir.from_onnx_text(IGNORES_LENGTHS)
    ir.save(model, tmp_path / "model.onnx")
    shapes = {str(value.name): value.shape for value in model.graph.inputs}
    sizes = {
        name: tuple(2 if n == "batch" else int(str(n)) for n in shape)
        for name, shape in shapes.items()
        if shape
    }
    ranges = {name: Range(size, size, size) for name, size in sizes.items()}
    with pytest.raises(ModelError, match=r"tensorrt-rtx ignores inputs of model\.onnx: filled;"):
        compile_tiny(tmp_path, tmp_path / "plan", {"decode": ranges})
    assert not (tmp_path / "plan").exists()


def test_a_profile_that_tensorrt_refuses_gives_its_reason(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    profiles = {
        name: dict(ranges) for name, ranges in read_manifest(tiny_engine.engine).profiles.items()
    }
    low = profiles["decode"]["input_ids"]
    profiles["decode"]["input_ids"] = Range(low.max, low.opt, low.min)
    with pytest.raises(ModelError, match=r"tensorrt-rtx .*input_ids"):
        compile_tiny(tiny_engine.engine, tmp_path / "plan", profiles)
    assert not (tmp_path / "plan").exists()


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ModelError, match=r"tensorrt-rtx cannot parse model\.onnx"):
        compile_tiny(tmp_path, tmp_path / "plan", {})


def test_a_flavour_that_is_not_installed_says_how_to_install_it() -> None:
    absent = Flavour("tensorrt", "tensorrt_of_nobody", extra="tensorrt", has_timing_cache=True)
    with pytest.raises(BackendError, match=r"pip install 'trt-lora\[tensorrt\]'"):
        Compiler(absent, NoProgress(), lora_plugin="native").compile(Path("x"), Path("y"), {})


@pytest.mark.parametrize("device", [0, 1])
def test_a_build_happens_on_the_gpu_of_its_caller(
    device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(devices=2)
    cuda.install(monkeypatch)
    cuda.current_device = device
    assert _run(lambda: cuda.current_device, threading.Event()) == device


def test_a_machine_without_a_driver_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert _run(lambda: "a plan", threading.Event()) == "a plan"


class TimingConfig:
    """The timing caches of full TensorRT's `IBuilderConfig`; it takes those of this GPU."""

    def __init__(self) -> None:
        self.cache: SimpleNamespace | None = None

    def create_timing_cache(self, data: bytes) -> SimpleNamespace | None:
        is_known = data in (b"", b"of another GPU") or data.startswith(b"of this")
        return SimpleNamespace(serialize=lambda: data or b"of this build") if is_known else None

    def set_timing_cache(self, cache: SimpleNamespace, ignore_mismatch: bool) -> bool:
        if cache.serialize() == b"of another GPU":
            return ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self) -> SimpleNamespace | None:
        return self.cache


def timed(path: Path) -> tuple[Compiler, Recorder, TimingConfig]:
    """Return a compiler with a timing cache, after it has loaded that."""
    recorder, config = Recorder(), TimingConfig()
    compiler = Compiler(TENSORRT, recorder, lora_plugin="native", timing_cache=path)
    compiler._load_timing_cache(config)
    return compiler, recorder, config


@pytest.mark.parametrize("data", [b"damaged", b"of another GPU"])
def test_a_timing_cache_that_tensorrt_refuses_is_replaced(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(data)
    compiler, recorder, config = timed(path)
    (note,) = recorder.notes
    assert note.startswith(f"{path} is ignored, and written anew at the end: it is damaged, or of")
    compiler._save_timing_cache(config)
    assert path.read_bytes() == b"of this build"


def test_a_timing_cache_of_this_gpu_is_used(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(b"of this GPU")
    _, recorder, config = timed(path)
    assert config.cache is not None
    assert config.cache.serialize() == b"of this GPU"
    assert not recorder.notes


@pytest.mark.parametrize("cache", [None, SimpleNamespace(serialize=lambda: None)])
def test_a_plan_outlives_a_timing_cache_that_tensorrt_does_not_give(
    cache: SimpleNamespace | None, tmp_path: Path
) -> None:
    path = tmp_path / "timing.cache"
    compiler, recorder, config = timed(path)
    config.cache = cache
    compiler._save_timing_cache(config)
    assert f"{path} is not written: " in recorder.notes[0]
    assert not path.exists()


def test_a_timing_cache_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(b"of this GPU, before")
    compiler, recorder, config = timed(path)
    config.cache = config.create_timing_cache(b"of this build")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        compiler._save_timing_cache(config)
    assert recorder.notes == [f"{path} is not written: [Errno 28] No space left on device"]
    assert path.read_bytes() == b"of this GPU, before"
    compiler._save_timing_cache(config)
    assert path.read_bytes() == b"of this build"


def test_a_build_waits_for_a_run_and_leaves_its_failures_to_it(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    failures = register_plugins(TENSORRT_RTX.load()).failures
    with ThreadPoolExecutor(1) as pool:
        with failures.collected() as of_the_run:
            failures.note("LoraAdd1: of the run")
            (tmp_path / "model.onnx").write_bytes(b"not a graph")
            build = pool.submit(compile_tiny, tmp_path, tmp_path / "plan", {})
            assert wait([build], timeout=1).not_done
            assert of_the_run == ["LoraAdd1: of the run"]
        with pytest.raises(ModelError, match=r"cannot parse model\.onnx") as caught:
            build.result()
    assert "of the run" not in str(caught.value)
