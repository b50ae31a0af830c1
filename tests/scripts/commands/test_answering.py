"""`trt-lora generate` and `trt-lora chat`: what they print is what `generate` answers."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answers import OPTIONS, TOKENS, answer
from support.commands import trt_lora

from trt_lora.runtime import SamplingParams, TextTokenizer, open_engine
from trt_lora.scripts import switch_adapters
from trt_lora.scripts.commands import chat
from trt_lora.scripts.terminal.console import INTERRUPTED


def test_one_prompt_is_streamed_as_generate_answers_it(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use = ["--adapter", f"a={adapter}", "--use", "a"]
    base = trt_lora(capsys, "generate", engine, "w5 w6 w7", *OPTIONS)
    adapted = trt_lora(capsys, "generate", engine, "w5 w6 w7", *OPTIONS, *use)
    assert base == answer(engine, "w5 w6 w7", {}) + "\n"
    assert adapted == answer(engine, "w5 w6 w7", {"a": adapter}, "a") + "\n"
    assert adapted != base


def test_several_prompts_are_one_batch_and_json_is_one_object_a_line(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = trt_lora(capsys, "generate", engine, "w5 w6", "w9", *OPTIONS, "--json")
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["prompt"] for row in rows] == ["w5 w6", "w9"]
    assert [row["text"] for row in rows] == [answer(engine, p, {}) for p in ("w5 w6", "w9")]
    assert all(len(row["token_ids"]) <= TOKENS for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def fields_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


def test_every_option_reaches_the_answer(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "--temperature": "0.8",
        "--top-k": "20",
        "--top-p": "0.95",
        "--min-p": "0.01",
        "--repetition-penalty": "1.2",
        "--presence-penalty": "0.5",
        "--frequency-penalty": "-0.5",
        "--logit-bias": "7=2.5",
        "--seed": "5",
        "--n": "2",
        "--logprobs": "1",
        "--stop": "w13",
    }
    sampling = SamplingParams(
        max_tokens=TOKENS,
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: 2.5},
        seed=5,
        n=2,
        logprobs=1,
        stop="w13",
    )
    flags = [text for option in options.items() for text in option]
    printed = trt_lora(capsys, "generate", engine, "w5 w6", *OPTIONS, *flags, "--json")
    with open_engine(engine, "onnxruntime") as opened:
        answers = opened.generate(["w5 w6"], sampling=sampling)
    for found, expected in zip(fields_of(printed), answers, strict=True):
        assert found["index"] == expected.index
        assert found["token_ids"] == list(expected.token_ids)
        assert expected.logprobs is not None
        assert len(found["logprobs"]) == len(expected.token_ids)
        for step, known in zip(found["logprobs"], expected.logprobs, strict=True):
            assert step == {str(token): one._asdict() for token, one in known.items()}
    assert answers[0].token_ids != answers[1].token_ids


def test_variables_of_the_template_reach_it(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in engine.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    template = "{{ first }} {% for m in messages %}{{ m.content }} {% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    options = [*OPTIONS, "--chat-template-kwargs", '{"first": "w5"}']
    expected = answer(engine, "w5 w6", {})
    assert expected != answer(engine, "w6", {})
    assert trt_lora(capsys, "generate", tmp_path, "w6", *options) == f"{expected}\n"
    printed = trt_lora(capsys, "generate", tmp_path, "w6", "w6", *options, "--json")
    assert [(row["prompt"], row["text"]) for row in fields_of(printed)] == [("w6", expected)] * 2
    assert talk(tmp_path, ["w6"], capsys, *options[len(OPTIONS) :])[0] == f"(base)> {expected}"
    refused = trt_lora(capsys, "chat", tmp_path, *OPTIONS, options[-2], "{", expected=2)
    assert refused.startswith("error: --chat-template-kwargs is '{', expected JSON")


def test_a_stop_string_ends_text_and_stream_alike(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = answer(engine, "w5 w6", {})
    stop = whole.split()[2]
    flags = [*OPTIONS, "--stop", stop]
    streamed = trt_lora(capsys, "generate", engine, "w5 w6", *flags)
    (found,) = fields_of(trt_lora(capsys, "generate", engine, "w5 w6", *flags, "--json"))
    assert streamed == found["text"] + "\n" == whole[: whole.index(stop)] + "\n"
    assert found["finish_reason"] == "stop"


def test_what_the_model_recommends_is_the_default_and_can_be_left_out(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine").mkdir()
    for file in engine.iterdir():
        if file.name not in ("generation_config.json", "manifest.json"):
            (tmp_path / "engine" / file.name).symlink_to(file)
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["files"].pop("generation_config.json", None)
    (tmp_path / "engine" / "manifest.json").write_text(json.dumps(manifest))
    config = tmp_path / "engine" / "generation_config.json"
    command = ["generate", str(config.parent), "w5 w6", "--backend", "onnxruntime"]

    config.write_text('{"max_new_tokens": 3, "repetition_penalty": 1.5}')
    recommended = SamplingParams(max_tokens=3, repetition_penalty=1.5, temperature=0)
    with open_engine(tmp_path / "engine", "onnxruntime") as opened:
        expected = opened.generate("w5 w6", sampling=recommended)
        assert opened.generate("w5 w6") == expected
        assert "".join(opened.stream("w5 w6")) == expected.text
    assert trt_lora(capsys, *command) == expected.text + "\n"
    more = trt_lora(capsys, *command, "--max-tokens", "5", "--json")
    assert fields_of(more)[0]["token_ids"][:3] == list(expected.token_ids)

    config.write_text('{"num_beams": 4}')
    refused = trt_lora(capsys, *command, expected=2)
    assert "generation_config.json: num_beams is 4, which is not done here" in refused
    left_out = trt_lora(capsys, *command, *OPTIONS, "--generation-config", "none")
    assert left_out == answer(engine, "w5 w6", {}) + "\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logprobs", "2"], "--logprobs is 2, and text has none; add --json"),
        (["--logit-bias", "7"], "--logit-bias is '7', expected ID=VALUE, such as 5=-1.5"),
        (["--n", "2"], "n is 2, but temperature 0 (greedy) gives equal answers"),
        (["--json-schema", "nowhere.json"], "nowhere.json cannot be read: "),
        (["--regex", "("], "structured"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    engine: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    printed = trt_lora(capsys, "generate", engine, "w5", *OPTIONS, *flags, expected=2)
    assert printed.startswith("error: ")
    assert message in printed


def talk(
    engine: Path,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    *options: str | Path,
    expected: int = 0,
) -> list[str]:
    """What a conversation prints, without the prompts of its lines; check its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("\n".join([*lines, ""])))
        printed = trt_lora(capsys, "chat", engine, *OPTIONS, *options, expected=expected)
    return printed.splitlines()


def test_a_conversation_remembers_switches_and_forgets(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["w5 w6", "/load a=" + str(adapter), "/use a", "w7", "/new", "w5 w6"]
    first, second, third, _ = talk(engine, lines, capsys)
    said = answer(engine, "w5 w6", {})
    assert first == f"(base)> {said}"
    turns = [("user", "w5 w6"), ("assistant", said), ("user", "w7")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert second == f"(base)> (base)> a> {answer(engine, messages, {'a': adapter}, 'a')}"
    assert third == f"a> a> {answer(engine, 'w5 w6', {'a': adapter}, 'a')}"


def test_adapters_are_listed_and_blended_and_a_mistake_ends_nothing(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--adapter", f"a={adapter}", "--use", "a"]
    lines = ["/use b", "/blend a", "/wave", "/blend a=0.5", "/adapters", "/use", "/quit", "w5"]
    printed = "\n".join(talk(engine, lines, capsys, *options, expected=2))
    assert "error: unknown adapter 'b'; loaded: a" in printed
    assert "error: /blend got 'a', expected NAME=WEIGHT: a=0.7" in printed
    assert "error: there is no /wave; commands:\n/use NAME" in printed
    assert printed.endswith("blend>   (base)\n  a\n* blend\nblend> (base)> ")


def test_a_blend_takes_no_adapters_place_but_that_of_an_earlier_one(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--adapter", f"a={adapter}"]
    also = ["--adapter", f"blend={adapter}"]
    named = talk(engine, ["/blend a=1"], capsys, *load, *also, expected=2)
    assert "error: an adapter of yours is named 'blend'; load it by another name" in named[0]
    again = talk(engine, ["/blend a=1", "/blend a=0.5", "/adapters"], capsys, *load)
    assert "error" not in "\n".join(again)


def test_a_conversation_in_json_is_one_object_for_every_line(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["w5 w6", "/use b", "/adapters", "/help", "/load a=" + str(adapter), "/use a", "w7"]
    lines += ["/blend a=0.5", "/new"]
    rows = [json.loads(line) for line in talk(engine, lines, capsys, "--json", expected=2)]
    said = answer(engine, "w5 w6", {})
    assert rows[:3] == [
        {"adapter": "", "prompt": "w5 w6", "text": said},
        {"error": {"type": "UnknownAdapterError", "message": "unknown adapter 'b'; loaded: none"}},
        {"adapters": [""], "active": ""},
    ]
    assert rows[3].keys() == {"help"}
    assert rows[4:6] == [
        {"command": "/load", "adapter": ""},
        {"command": "/use", "adapter": "a"},
    ]
    assert (rows[6]["adapter"], rows[6]["prompt"]) == ("a", "w7")
    assert rows[7:] == [{"command": c, "adapter": "blend"} for c in ("/blend", "/new")]


def test_what_no_turn_could_do_is_refused_before_the_first(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = trt_lora(capsys, "chat", engine, *OPTIONS, "--logit-bias", "99999=1", expected=2)
    assert printed.startswith("error: logit_bias")


def test_a_mistake_cannot_move_the_cursor(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = talk(engine, ["/use a\x1b[2J"], capsys, expected=2)
    assert "\x1b" not in "".join(printed)
    unknown = trt_lora(capsys, "inspect", "engine", "a\x1b[2J", expected=2)
    assert "\x1b" not in unknown
    missing = trt_lora(capsys, "inspect", "no\x1b[2Jengine", expected=2)
    assert "\x1b" not in missing
    assert "no\\x1b[2Jengine" in missing


def test_ctrl_c_ends_a_conversation_that_comes_from_a_pipe(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr("trt_lora.scripts.commands.chat.stream_from", interrupted)
    assert talk(engine, ["w5", "w6"], capsys, expected=INTERRUPTED) == ["(base)> half"]


class TypedLines:
    """Lines as they are typed in a terminal, with an answer interrupted between them."""

    is_interactive = True

    def __init__(self, *_: object) -> None:
        self._lines = iter(["/use a", "/adapters"])

    def read(self, prompt: str) -> str:
        print(prompt, end="")
        if (line := next(self._lines, None)) is None:
            raise EOFError
        return line


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_in_a_terminal_ctrl_c_ends_a_command_of_the_conversation_and_no_more(
    options: list[str],
    engine: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(adapters: object, name: str) -> None:
        if name:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "LineEditor", TypedLines)
    monkeypatch.setattr(chat, "adapter_or_base", interrupted)
    printed = talk(engine, [], capsys, *options)
    error = {"error": {"type": "KeyboardInterrupt", "message": "interrupted"}}
    if options:
        assert [json.loads(line) for line in printed] == [error, {"adapters": [""], "active": ""}]
    else:
        assert printed[1:] == ["(base)> error: interrupted", "(base)> * (base)", "(base)> "]


def test_a_line_that_is_no_text_costs_a_message(engine: Path) -> None:
    chat = [sys.executable, "-m", "trt_lora.scripts.trt_lora_command", "chat", str(engine)]
    done = subprocess.run(
        [*chat, *OPTIONS],
        input=b"\xff\nw5\n",
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        check=False,
    )
    first, second, _ = done.stdout.decode().splitlines()
    assert first.startswith("(base)> error: ")
    assert second == f"(base)> {answer(engine, 'w5', {})}"
    assert (done.returncode, done.stderr) == (2, b"")


def test_switching_in_json_is_one_object_an_answer(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--engine", str(engine), "--adapter", f"a={adapter}", "--prompt", "w5 w6", *OPTIONS]
    switch_adapters.main([*words, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["adapter"] for row in rows] == ["", "a"]
    assert rows[1]["text"] == answer(engine, "w5 w6", {"a": adapter}, "a")
    assert all(row["microseconds"] > 0 for row in rows)


def test_a_misspelled_adapter_gets_the_nearest_name(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--adapter", f"pirate={adapter}", "--use", "pirat"]
    printed = trt_lora(capsys, "generate", engine, "w5", *OPTIONS, *options, expected=2)
    assert printed.endswith("unknown adapter 'pirat'; loaded: pirate; did you mean 'pirate'?\n")


def test_a_streamed_text_is_the_decoded_text(engine: Path) -> None:
    tokenizer = TextTokenizer(engine)
    ids = [5, 6, 0, 2, 90]
    stream = tokenizer.stream()
    assert "".join([*map(stream.add, ids), stream.end()]) == tokenizer.decode(ids)
