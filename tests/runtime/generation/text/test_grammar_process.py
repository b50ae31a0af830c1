"""Grammars that hang, crash or fill the machine: another one is compiled after each of them."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.eventually import eventually
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.generation.text import grammar_compiler, grammar_process
from trt_lora.runtime.generation.text.grammar_process import GrammarProcess
from trt_lora.runtime.generation.text.structured import Grammars, StructuredOutputsParams

# The program does what its grammar says, and notes it.
FAKE = """
import os, time

class LLTokenizer:
    def __init__(self, text, *, n_vocab, eos_token):
        assert (text, n_vocab, eos_token) == ("the tokenizer", 5, [2])

class LLParserLimits:
    def __init__(self, **limits):
        pass

class LLMatcher:
    def __init__(self, tokenizer, grammar, *, log_level, limits):
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(f"{os.getpid()} {grammar}\\n")
        self.grammar = grammar
        if grammar == "hangs":
            time.sleep(1000)
        if grammar == "crashes":
            os.abort()
        if grammar == "fills the machine":
            bytearray(1 << 30)

    def compute_bitmask(self):
        if self.grammar == "hangs at its first token":
            time.sleep(1000)
"""
DEEP = "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(2000)) + '\nr2000: "b"'


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the processes note what they compile, with llguidance replaced by our program."""
    (tmp_path / "llguidance.py").write_text(FAKE)
    path = tmp_path / "notes"
    path.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(path))
    monkeypatch.setattr(grammar_process, "_MOST_S", 0.5)
    return path


@pytest.fixture
def process(notes: Path) -> Iterator[GrammarProcess]:
    made = GrammarProcess("the tokenizer", 5, 2)
    yield made
    if made._connection is not None:
        made._end()
    pids = {int(line.split()[0]) for line in notes.read_text().splitlines()}
    assert eventually(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def noted(notes: Path) -> list[tuple[int, str]]:
    pairs = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    return [(int(pid), grammar) for pid, grammar in pairs]


@pytest.mark.parametrize(
    ("grammar", "failure"),
    [
        ("hangs", "it takes more than 0.5 s"),
        ("hangs at its first token", "it takes more than 0.5 s"),
        ("crashes", "it takes too much memory, or too deep a stack"),
        ("fills the machine", "it takes too much memory, or too deep a stack"),
    ],
)
def test_a_grammar_that_is_not_over_in_time_says_why_and_the_next_one_is_tried(
    process: GrammarProcess, notes: Path, grammar: str, failure: str
) -> None:
    for name in ("first", grammar, "next"):
        assert process.failure(name) == (failure if name == grammar else "")
    pids = dict.fromkeys(pid for pid, _ in noted(notes))
    assert len(pids) == 2 if "hangs" in grammar else 3  # what dies is tried in a new one


def test_a_grammar_is_tried_once_whatever_comes_of_it(
    process: GrammarProcess, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "_KNOWN", 3)
    for name in ("a", "crashes", "b", "a", "crashes", "b"):
        process.failure(name)
    assert [grammar for _, grammar in noted(notes)] == ["a", "crashes", "crashes", "b"]
    process.failure("c")  # and the one that was tried first is forgotten
    process.failure("a")
    assert [grammar for _, grammar in noted(notes)][4:] == ["c", "a"]


def test_threads_that_want_the_same_grammar_try_it_once(
    process: GrammarProcess, notes: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        failures = list(pool.map(process.failure, ["hangs"] * 4))
    assert failures == ["it takes more than 0.5 s"] * 4
    assert [grammar for _, grammar in noted(notes)] == ["hangs"]


def test_one_that_is_known_waits_for_none_that_hangs(
    process: GrammarProcess, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.failure("known")
    monkeypatch.setattr(grammar_process, "_MOST_S", 60.0)
    hanging = threading.Thread(target=process.failure, args=("hangs",))
    hanging.start()
    assert eventually(lambda: "hangs" in notes.read_text())
    assert process.failure("known") == ""
    assert hanging.is_alive()
    os.kill(noted(notes)[-1][0], signal.SIGKILL)
    assert eventually(lambda: notes.read_text().count("hangs") == 2)  # in a new one
    os.kill(noted(notes)[-1][0], signal.SIGKILL)
    hanging.join()


def test_a_process_that_has_died_of_something_else_is_begun_anew(
    process: GrammarProcess, notes: Path
) -> None:
    process.failure("first")
    os.kill(noted(notes)[0][0], signal.SIGKILL)
    assert process.failure("second") == ""


def test_a_grammar_that_is_left_alone_ends_its_process(
    process: GrammarProcess, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of Python may have been killed, and nothing else would end it then."""
    path = notes.with_name("compiler.py")
    text = Path(str(grammar_compiler.__file__)).read_text()
    path.write_text(text.replace("_ORPHANED_S = 10", "_ORPHANED_S = 1"))
    monkeypatch.setattr(grammar_compiler, "__file__", str(path))
    monkeypatch.setattr(grammar_process, "_MOST_S", 60.0)
    assert process.failure("hangs") == "it takes too much memory, or too deep a stack"
    assert process.failure("next") == ""


@pytest.mark.parametrize(
    ("program", "failure"),
    [(None, "No such file"), ("exit 1", ""), ("sleep 99", "not begun in 1 s")],
)
def test_a_python_that_does_not_start_is_named(
    process: GrammarProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: str | None,
    failure: str,
) -> None:
    path = tmp_path / "python"
    if program is not None:
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(grammar_process, "_START_S", 1.0)
    with pytest.raises(BackendError, match=f"tried in a process of {path}: .*{failure}"):
        process.failure("a")
    monkeypatch.undo()


# ------------------------------------------------------------------------------- with llguidance


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: n for n, char in enumerate(bytes_)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return Grammars(made.to_str(), len(bytes_) + 1, len(bytes_))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (
            StructuredOutputsParams(json={"type": "integer", "multipleOf": 999_983}),
            "a json .*: it takes (more than 1 s|too much memory)",
        ),
        (StructuredOutputsParams(grammar=DEEP), "a grammar .*: it takes .* too deep a stack"),
        (StructuredOutputsParams(regex="(" * 9000 + "a" + ")" * 9000), "a regex .*: .*invalid"),
        (StructuredOutputsParams(grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
        (StructuredOutputsParams(grammar="start: @start"), ""),
        (
            StructuredOutputsParams(json={"properties": {f"{n:x}": {} for n in range(4000)}}),
            "a json .*: (grammar size|it takes too much memory)",
        ),
    ],
)
def test_what_takes_the_machine_is_refused_and_the_next_one_is_compiled(
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
    wanted: StructuredOutputsParams,
    reason: str,
) -> None:
    monkeypatch.setattr(grammar_process, "_MOST_S", 1.0)
    with pytest.raises(ConfigError, match=f"(?s)structured_outputs has .*{reason}"):
        grammars.constraint(wanted, [256])
    monkeypatch.undo()
    assert grammars.constraint(StructuredOutputsParams(regex="a+"), [256]).error == ""


def test_what_is_asked_for_in_common_is_compiled(grammars: Grammars) -> None:
    address = {"type": "object", "properties": {"street": {"type": "string"}}}
    fields = {f"field {n}": {"type": "string"} for n in range(200)}
    asked = [
        {"json": {"type": "object", "properties": {**fields, "at": address}}},
        {"json": {"anyOf": [{"const": f"value {n}"} for n in range(900)]}},
        {"json": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
        {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"},
        {"regex": r"Thought: [^\n]{1,400}\nAction: (search|finish)\[[^\]]{1,80}\]"},
        {"grammar": 'start: e\ne: t (("+"|"-") t)*\nt: /[0-9]+/ | "(" e ")"'},
    ]
    for given in asked:
        wanted = StructuredOutputsParams(**given)  # type: ignore[arg-type]
        assert grammars.constraint(wanted, [256]).error == ""


def test_a_json_schema_is_data_and_no_program_of_llguidances(grammars: Grammars) -> None:
    for text in ('{}, {"lark_grammar": "start: "}', "{}]}"):
        with pytest.raises(ConfigError, match="which is no JSON"):
            StructuredOutputsParams(json=text)
    listed = json.dumps({"grammars": [{"json_schema": {}}]})
    with pytest.raises(ConfigError, match="a grammar that llguidance refuses"):
        grammars.constraint(StructuredOutputsParams(grammar=listed), [256])


def test_the_program_of_the_process_imports_nothing_of_ours() -> None:
    """It is run by its path, where the package may not be found."""
    path = str(grammar_compiler.__file__)
    program = f"import runpy, sys; runpy.run_path({path!r}); print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert "trt_lora" not in found.stdout


def test_nothing_is_left_of_grammars_that_are_gone(notes: Path) -> None:
    made = GrammarProcess("the tokenizer", 5, 2)
    made.failure("a")
    ((pid, _),) = noted(notes)
    assert is_alive(pid)
    del made
    gc.collect()
    assert eventually(lambda: not is_alive(pid))
