"""An installation without extras: every command says what it lacks, and needs none for its help."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TinyEngine

# What `pip install trt-lora` alone does not bring.
EXTRAS = (
    "torch", "transformers", "accelerate", "onnx", "onnxscript", "onnx_ir", "rich", "onnxruntime",
    "shtab",
    "tensorrt", "tensorrt_rtx", "cuda", "tokenizers", "jinja2", "polygraphy", "peft", "zmq",
    "msgspec", "llguidance",
)  # fmt: skip

# Runs a command that finds none of the modules named by the first argument.
LEAN = """
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(name, path, target)

hidden, command, *argv = sys.argv[1:]
HIDDEN = set(hidden.split(","))
place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = Finder
if command == "build-engine":
    from trt_lora.scripts.build_engine import main
else:
    from trt_lora.scripts.trt_lora_command import main
    argv = [command, *argv]
try:
    main(argv)
finally:
    assert not HIDDEN & {name.partition(".")[0] for name in sys.modules}
"""


def lean(*argv: str | Path, hidden: tuple[str, ...] = EXTRAS) -> subprocess.CompletedProcess[str]:
    """Run a command where the hidden libraries are not installed."""
    command = [sys.executable, "-c", LEAN, ",".join(hidden), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ["build-engine"],
        ["inspect"],
        ["convert-adapter"],
        ["merge"],
        ["verify"],
        ["compare"],
        ["bench"],
        ["report"],
    ],
    ids=" ".join,
)
def test_help_needs_no_extra(command: list[str]) -> None:
    done = lean(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def arguments(tiny: TinyEngine, folder: Path) -> dict[str, list[str | Path]]:
    """A command line for everything that needs an extra, by name."""
    build: list[str | Path] = ["build-engine", "--model", tiny.model, "--output", folder / "e"]
    build += ["--lora-target-modules", "q_proj"]
    model: list[str | Path] = ["--model", tiny.model]
    (folder / "bin").mkdir()
    (folder / "bin" / "adapter_model.bin").touch()
    (folder / "bin" / "adapter_config.json").write_text("{}")
    return {
        "build": build,
        "dry run": [*build, "--dry-run"],
        "merge": ["merge", *model, "--adapter", tiny.adapter, folder / "m"],
        "verify": ["verify", tiny.engine, *model, "--adapter", tiny.adapter],
        "compare": ["compare", tiny.engine],
        "bench": ["bench", tiny.engine],
        "report": ["report", tiny.engine, "--html", folder / "page.html"],
        "kernels": ["inspect", tiny.engine, "--kernels"],
        "convert a .bin": ["convert-adapter", folder / "bin", folder / "c", "--format", "peft"],
    }


@pytest.mark.parametrize(
    ("what", "extra", "hidden"),
    [
        ("build", "export", EXTRAS),
        ("dry run", "export", EXTRAS),
        ("merge", "peft", EXTRAS),
        ("merge", "peft", ("peft",)),
        ("verify", "peft", EXTRAS),
        ("verify", "peft", ("peft",)),
        ("compare", "polygraphy", EXTRAS),
        ("compare", "cpu", ("onnxruntime",)),
        ("compare", "export", ("onnx_ir",)),
        ("bench", "cpu", EXTRAS),
        ("report", "text", EXTRAS),
        ("kernels", "export", EXTRAS),
        ("convert a .bin", "export", EXTRAS),
    ],
)
def test_what_is_missing_is_said_in_one_line_with_the_extra_that_has_it(
    what: str, extra: str, hidden: tuple[str, ...], tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    done = lean(*arguments(tiny_engine, tmp_path)[what], hidden=hidden)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(f"pip install 'trt-lora[{extra}]'")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_looking_at_engines_and_adapters_needs_no_extra(tiny_engine: TinyEngine) -> None:
    done = lean("inspect", tiny_engine.engine, "--adapter", tiny_engine.adapter)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the engine takes it" in done.stdout


def test_a_doctor_needs_no_extra_and_says_what_to_install(tiny_engine: TinyEngine) -> None:
    done = lean("doctor", tiny_engine.engine)
    assert (done.returncode, done.stderr) == (1, "")
    for missing in ("onnxruntime   not installed; pip install 'trt-lora[cpu]'", "trt-lora[rtx]"):
        assert missing in done.stdout
    assert "TensorRT (cuda)     no: " in done.stdout
    assert "ONNX Runtime (cpu)  no: onnxruntime cannot be imported" in done.stdout
