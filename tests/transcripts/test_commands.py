"""Commands that need no builder, in a terminal, from help to a refusal."""

import json
import re
from pathlib import Path

from conftest import TinyEngine
from support.terminal import ended, terminal


def transcript(command: str, *arguments: str | Path) -> tuple[str, int]:
    """All that a command shows, and its exit status."""
    with terminal(command, *arguments) as child:
        return ended(child)


def test_one_prompt_is_answered(spoken: Path, tiny_engine: TinyEngine) -> None:
    use = ["--adapter", f"a={tiny_engine.adapter}", "--use", "a", "--max-tokens", "6"]
    printed, status = transcript("trt-lora", "generate", spoken, "w5 w6 w7", *use)
    assert status == 0
    (line,) = printed.splitlines()
    words = line.split()
    assert 0 < len(words) <= 6
    assert all(word.startswith("w") for word in words)


def test_an_engine_is_shown_and_an_adapter_is_checked_against_it(tiny_engine: TinyEngine) -> None:
    printed, status = transcript(
        "trt-lora", "inspect", tiny_engine.engine, "--adapter", tiny_engine.adapter
    )
    assert status == 0
    assert "the engine takes it" in printed


def test_a_folder_that_is_no_engine_is_refused_in_one_line(tmp_path: Path) -> None:
    printed, status = transcript("trt-lora", "chat", tmp_path)
    assert status == 2
    assert printed.startswith("error: ")
    assert "Traceback" not in printed


def test_an_engine_is_measured_with_an_adapter_and_a_random_one(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    adapter, export = f"mine={tiny_engine.adapter}", str(tmp_path / "bench.json")
    options = ["--rows", "1", "--rounds", "1", "--ranks", "8", "--new-tokens", "4"]
    options += ["--prompt-tokens", "4", "--adapter", adapter, "--export", export]
    printed, status = transcript("trt-lora", "bench", tiny_engine.engine, *options)
    assert status == 0
    assert all(word in printed for word in ("mine", "rank 8", "memory"))
    turns = [line for line in printed.splitlines() if line.startswith("round 1 of 1, 1 row: ")]
    assert len(turns) == 3  # a terminal that cannot draw bars has lines
    (workload,) = json.loads(Path(export).read_text())["workloads"]
    assert len(workload["contestants"]) == 3


def test_the_machine_and_an_engine_are_looked_at(tiny_engine: TinyEngine) -> None:
    printed, status = transcript("trt-lora", "doctor", tiny_engine.engine)
    assert status == 0
    assert re.search(r"ONNX Runtime \(cpu\) +yes", printed)


def test_what_lies_in_a_folder_is_listed(tiny_engine: TinyEngine) -> None:
    printed, status = transcript("trt-lora", "list", tiny_engine.adapter.parent)
    assert status == 0
    assert tiny_engine.adapter.name in printed


def test_a_prompt_is_typed_and_answered_with_the_one_adapter_that_is_given(
    spoken: Path, tiny_engine: TinyEngine
) -> None:
    adapter = f"a={tiny_engine.adapter}"
    options = ["--adapter", adapter, "--max-tokens", "6"]
    with terminal("trt-lora", "generate", spoken, "-", *options) as child:
        child.sendline("w5 w6 w7")
        child.sendeof()
        typed, status = ended(child)
    assert status == 0
    chosen, _ = transcript("trt-lora", "generate", spoken, "w5 w6 w7", *options, "--use", "a")
    assert typed.endswith(chosen)


def test_a_word_that_no_parser_knows_is_two_lines(spoken: Path) -> None:
    printed, status = transcript("trt-lora", "generate", spoken, "w5", "--adaptr", "a=b")
    said = "error: unrecognized arguments: --adaptr a=b; did you mean '--adapter'?"
    assert (printed, status) == (f"{said}\nsee: trt-lora generate --help\n", 2)
