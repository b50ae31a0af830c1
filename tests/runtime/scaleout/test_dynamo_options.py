"""The command line of a worker of Dynamo."""

from pathlib import Path

import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.scaleout.dynamo_options import DynamoOptions, dynamo_options


def test_what_is_not_said_is_the_default(tmp_path: Path) -> None:
    assert dynamo_options([str(tmp_path)]) == DynamoOptions(tmp_path)
    assert DynamoOptions(tmp_path).base == tmp_path.name


def test_what_is_said_is_told_dynamo(tmp_path: Path) -> None:
    words = "--served-model-name base --discovery-backend file --event-plane zmq"
    found = dynamo_options([str(tmp_path), *words.split(), "--dyn-tool-call-parser", "hermes"])
    worker = found.worker
    assert worker["model_name"] == str(tmp_path)
    assert worker["served_model_name"] == "base"
    assert (worker["discovery_backend"], worker["event_plane"]) == ("file", "zmq")
    assert (worker["tool_call_parser"], worker["reasoning_parser"]) == ("hermes", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora-dir", "/nowhere"], "--lora-dir is /nowhere, expected a folder"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-gpu-lora-count", "-1"], "--max-gpu-lora-count is -1"),
        (["--max-cpu-loras", "0"], "--max-cpu-loras is 0"),
    ],
)
def test_what_has_no_meaning_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        dynamo_options([str(tmp_path), *words])


@pytest.mark.parametrize(
    "words", [["--discovery-backend", "nats"], ["--lora", "x"], ["--lora-dri", "x"]]
)
def test_a_typing_error_is_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        dynamo_options([str(tmp_path), *words])
    assert words[0] in capsys.readouterr().err
