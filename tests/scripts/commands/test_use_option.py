"""`--use`: the adapter that answers in `generate` and `chat`, and what answers without it."""

import io
from pathlib import Path

import pytest
from support.answers import OPTIONS, answer
from support.commands import streams, trt_lora

QUESTION = "w5 w6 w7"


def generated(
    engine: Path, capsys: pytest.CaptureFixture[str], *options: str | Path
) -> tuple[str, str]:
    """The answer, and what is said beside it."""
    out, err = streams(capsys, "generate", engine, QUESTION, *OPTIONS, *options)
    return out.removesuffix("\n"), err


def test_one_adapter_that_is_given_answers(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = generated(engine, capsys, "--adapter", f"a={adapter}")
    assert found == answer(engine, QUESTION, {"a": adapter}, "a")
    assert found != answer(engine, QUESTION, {})
    assert said == ""


def test_a_conversation_with_one_adapter_begins_with_it(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n/use base\n"))
    printed = trt_lora(capsys, "chat", engine, *OPTIONS, "--adapter", f"a={adapter}")
    assert printed == f"a> {answer(engine, QUESTION, {'a': adapter}, 'a')}\na> (base)> \n"


def test_of_several_adapters_none_answers_and_a_note_says_how_to_choose(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--adapter", f"a={adapter}", "--adapter", f"b={adapter}"]
    found, said = generated(engine, capsys, *both)
    assert found == answer(engine, QUESTION, {})
    assert said == "note: the base model answers; choose an adapter with --use: a, b\n"
    chosen, silent = generated(engine, capsys, *both, "--use", "b")
    assert (chosen, silent) == (answer(engine, QUESTION, {"b": adapter}, "b"), "")


@pytest.mark.parametrize("name", ["base", ""])
def test_the_base_model_can_be_asked_for_though_an_adapter_is_given(
    name: str, engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = generated(engine, capsys, "--adapter", f"a={adapter}", "--use", name)
    assert (found, said) == (answer(engine, QUESTION, {}), "")
    assert generated(engine, capsys, "--use", name) == (found, "")


def test_an_adapter_of_the_name_base_is_that_adapter(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = generated(engine, capsys, "--adapter", f"base={adapter}", "--use", "base")
    assert found == answer(engine, QUESTION, {"base": adapter}, "base")


@pytest.mark.parametrize("command", [["generate", "{engine}", "w5"], ["chat", "{engine}"]])
def test_an_adapter_that_was_not_given_is_refused_with_the_option_that_gives_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(engine=tmp_path) for word in command]  # nothing is opened before
    printed = trt_lora(capsys, *words, "--use", "pirate", expected=2)
    assert printed == (
        "error: --use is 'pirate', and no adapter is given; add --adapter pirate=PATH\n"
    )


def test_the_help_says_how_to_ask_for_the_base_model(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(trt_lora(capsys, "chat", "--help").split())
    assert "--use NAME the adapter that answers, or base: no adapter (default: the one that" in said
