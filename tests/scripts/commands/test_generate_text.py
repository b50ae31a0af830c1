"""`trt-lora generate`: prompts from the command line, standard input and files, in batches."""

import io
import json
from pathlib import Path

import pytest
from support.answers import OPTIONS, answer
from support.commands import trt_lora

from trt_lora.runtime import read_manifest

MORE_THAN_A_BATCH = ["w5 w6", "w9", "w7 w8 w9", "w11", "w12 w13"]


def fields(printed: str, name: str) -> list[object]:
    return [json.loads(line)[name] for line in printed.splitlines()]


def test_a_dash_is_the_whole_of_standard_input_as_one_prompt(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\nw7\n"))
    printed = trt_lora(capsys, "generate", engine, "-", *OPTIONS, "--json")
    assert fields(printed, "prompt") == ["w5 w6\nw7"]
    assert fields(printed, "text") == [answer(engine, "w5 w6\nw7", {})]


def test_a_file_has_a_prompt_a_line_behind_those_of_the_command_line(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("w6 w7\n\n  \nw9 \n")
    words = ["w5", "--prompts", str(file), "--json"]
    printed = trt_lora(capsys, "generate", engine, *words, *OPTIONS)
    assert fields(printed, "prompt") == ["w5", "w6 w7", "w9 "]
    alone = trt_lora(capsys, "generate", engine, *words[1:], *OPTIONS)
    assert fields(alone, "prompt") == ["w6 w7", "w9 "]


def test_prompts_may_stand_before_options_and_behind_them(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["w5", "w6", *OPTIONS, "--json"], [*OPTIONS, "--json", "w5", "w6"]):
        assert fields(trt_lora(capsys, "generate", engine, *words), "prompt") == ["w5", "w6"]


def test_more_prompts_than_a_batch_has_rows_are_answered_in_several(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(MORE_THAN_A_BATCH) > read_manifest(engine).max_batch_size
    printed = trt_lora(capsys, "generate", engine, *MORE_THAN_A_BATCH, *OPTIONS, "--json")
    assert fields(printed, "prompt") == MORE_THAN_A_BATCH
    assert fields(printed, "text") == [answer(engine, p, {}) for p in MORE_THAN_A_BATCH]


def test_a_batch_has_room_for_all_answers_to_its_prompts(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = ["--n", "2", "--temperature", "1", "--seed", "3", "--json"]
    printed = trt_lora(capsys, "generate", engine, "w5", "w6", *OPTIONS, *draws)
    assert fields(printed, "prompt") == ["w5", "w5", "w6", "w6"]
    assert fields(printed, "index") == [0, 1, 0, 1]
    draws[1] = "3"  # more than the engine's two rows
    printed = trt_lora(capsys, "generate", engine, "w5", *OPTIONS, *draws)
    assert fields(printed, "index") == [0, 1, 2]


def test_several_answers_are_told_apart_by_their_prompts(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "w5 " * 60 + "\nw6"
    printed = trt_lora(capsys, "generate", engine, "w5 \x1b[2J", long, "w7", *OPTIONS)
    lines = printed.splitlines()
    assert lines[::2] == ["[1] w5 \\x1b[2J", f"[2] {'w5 ' * 23}w...", "[3] w7"]
    assert lines[5] == answer(engine, "w7", {})
    draws = ["--n", "2", "--temperature", "1", "--seed", "3"]
    drawn = trt_lora(capsys, "generate", engine, "w5", *OPTIONS, *draws).splitlines()
    assert drawn[::2] == ["[1, answer 1 of 2] w5", "[1, answer 2 of 2] w5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to answer; pass a PROMPT, - to read it from standard input, or --prompts"),
        (["-", "w5", "-"], "- is there twice, and standard input is one prompt; pass it once"),
        (["--prompts", "nowhere.txt"], "nowhere.txt cannot be read: "),
        (["--prompts", "{empty}"], "empty.txt holds no prompt; write one a line"),
    ],
)
def test_what_is_no_prompt_is_refused(
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    given = [word.format(empty=tmp_path / "empty.txt") for word in words]
    printed = trt_lora(capsys, "generate", engine, *given, *OPTIONS, expected=2)
    assert printed.startswith("error: ")
    assert message in printed


def test_standard_input_that_is_closed_is_no_prompt(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    printed = trt_lora(capsys, "generate", engine, "-", *OPTIONS, expected=2)
    assert printed == "error: standard input is closed, and a prompt is read from it; open it\n"


def test_json_names_the_adapter_that_answered(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--adapter", f"a={adapter}", "--json"]
    assert fields(trt_lora(capsys, "generate", engine, "w5", *OPTIONS, *given), "adapter") == ["a"]
    given += ["--use", "base"]
    assert fields(trt_lora(capsys, "generate", engine, "w5", *OPTIONS, *given), "adapter") == [""]
