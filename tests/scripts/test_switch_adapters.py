"""The script that users copy from: every bad adapter gets one message and exit 2."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import TinyEngine

from trt_lora.scripts.switch_adapters import main


def refusal(
    capsys: pytest.CaptureFixture[str], engine: Path, *adapters: str, backend: str = "auto"
) -> str:
    """Run the script, which must exit with 2, and return its one-line message."""
    named = [word for adapter in adapters for word in ("--adapter", adapter)]
    with pytest.raises(SystemExit) as raised:
        main(["--engine", str(engine), *named, "--prompt", "hi", "--backend", backend])
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def test_an_adapter_that_is_refused_costs_one_message_that_names_it(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is refused and why is told by the tests of runtime/adapters."""
    adapter = Path(shutil.copytree(tiny_engine.adapter, tmp_path / "a"))
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kasa_config": {"beta": 1}}))
    said = refusal(capsys, tiny_engine.engine, f"a={adapter}")
    assert f"{path}: kasa_config is {{'beta': 1}}: KaSA truncates the base weight" in said


def test_two_adapters_of_one_name_are_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"a={tiny_engine.adapter}"
    assert "--adapter names two adapters 'a'" in refusal(capsys, tiny_engine.engine, named, named)


@pytest.mark.parametrize("argument", ["json", "=path", "name="])
def test_an_adapter_argument_of_another_form_is_refused(
    argument: str, tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected NAME=PATH" in refusal(capsys, tiny_engine.engine, argument)


def test_an_engine_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not an engine directory" in refusal(capsys, tmp_path)


def test_an_impossible_backend_says_why(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, tiny_engine.engine, backend="tensorrt")
    assert "it was built with --flavour none and has no plan" in said


def test_an_engine_without_a_tokenizer_says_so(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, tiny_engine.engine, f"a={tiny_engine.adapter}")
    assert "has no tokenizer.json; pass prompts as lists of token ids" in said
