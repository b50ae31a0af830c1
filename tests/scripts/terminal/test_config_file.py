"""A config file of `build-engine`: what is printed is read as the same build, typos are refused."""

import argparse
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trt_lora.scripts.build_engine import main
from trt_lora.scripts.terminal.build_options import build_config, build_parser
from trt_lora.scripts.terminal.config_file import config_text, file_options, kind_of, read_config
from trt_lora.scripts.terminal.trtllm_options import IGNORED, REFUSED

OPTIONS = file_options(build_parser())
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


def values_of(action: argparse.Action) -> st.SearchStrategy[Any]:
    """Any value that an option may have, as the parser has it."""
    words: st.SearchStrategy[Any] = WORDS.map(Path) if action.type is Path else WORDS
    if action.choices is not None:
        words = st.sampled_from(list(action.choices))
    return {
        "flag": st.booleans(),
        "integer": st.none() | st.integers(),
        "list": st.lists(words, min_size=1, max_size=3),
        "text": words,
    }[kind_of(action)]


def read(path: Path, text: str) -> dict[str, Any]:
    """What a file of that text says."""
    path.write_text(text, encoding="utf-8")
    return read_config(path, build_parser())[0]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.fixed_dictionaries({a.dest: values_of(a) for a in OPTIONS.values()}))
def test_what_is_printed_is_read_as_the_same_options(
    values: dict[str, Any], tmp_path: Path
) -> None:
    printed = config_text(build_parser(), argparse.Namespace(**values))
    expected = {name: value for name, value in values.items() if value is not None}
    assert read(tmp_path / "build.toml", printed) == expected


def test_characters_that_toml_escapes_are_read_as_they_were(tmp_path: Path) -> None:
    text = "".join(map(chr, (*range(1, 128), 0x2028, 0xFFFF, 0x10FFFF)))
    args = build_parser().parse_args(["--revision", text, "--lora-dir", text])
    values = read(tmp_path / "build.toml", config_text(build_parser(), args))
    assert (values["revision"], values["lora_dir"]) == (text, [Path(text)])


def printed_config(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    """The options that a command line ends up with."""
    main([*map(str, argv), "--print-config"])
    return tomllib.loads(capsys.readouterr().out)


def of_kind(name: str, which: int) -> tuple[str, list[str]]:
    """The first or second value of an option: in TOML, and on a command line."""
    action = OPTIONS[name]
    text = list(action.choices)[-which] if action.choices else f"v{which}"
    return {
        "flag": ("true", [f"--{name}"]) if which else ("false", [f"--no-{name}"]),
        "integer": (f"{which + 2}", [f"--{name}", f"{which + 2}"]),
        "list": (f'["{text}", "b"]', [f"--{name}", text, "b"]),
        "text": (f'"{text}"', [f"--{name}", text]),
    }[kind_of(action)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("which", [0, 1])
def test_the_command_line_wins_over_the_file(
    name: str, which: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_file, _), (expected, words) = of_kind(name, which), of_kind(name, 1 - which)
    file = tmp_path / "build.toml"
    file.write_text(f"{name} = {in_file}\n", encoding="utf-8")
    shown = "output" if name == "output-dir" else name
    assert printed_config(capsys, "--config", file)[shown] == tomllib.loads(f"x = {in_file}")["x"]
    found = printed_config(capsys, "--config", file, *words)[shown]
    assert found == tomllib.loads(f"x = {expected}")["x"] != tomllib.loads(f"x = {in_file}")["x"]


def test_without_options_every_one_is_printed_with_its_help_and_nothing_is_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--print-config"])
    printed = capsys.readouterr().out
    for name, action in OPTIONS.items():
        assert name == "output-dir" or f"\n{name} = " in printed or f"\n# {name} = " in printed
        assert " ".join((action.help or "").split()[:3]) in printed
    assert "\n# choose from: auto, single, slots\nlora-mode" in printed
    assert "\n# model = DIR\n" in printed


def test_a_build_of_a_file_is_the_build_of_the_same_options(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    words = ["--model", str(tmp_path / "m"), "--lora-target-modules", "q_proj", "--max-loras", "4"]
    parser = build_parser()
    args = parser.parse_args([*words, "--dtype", "float32", "--timing-cache", "t", "--force"])
    values = read(tmp_path / "build.toml", config_text(parser, args))
    assert build_config(parser.parse_args([], argparse.Namespace(**values))) == build_config(args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-lora-rnk = 8", "no option 'max-lora-rnk' for a file; did you mean 'max-lora-rank'?"),
        ("paged-kv-cach = 8", "did you mean 'paged-kv-cache'?"),
        ("zzz = 8", "no option 'zzz' for a file; build-engine --print-config lists all"),
        ('config = "a.toml"', "no option 'config' for a file"),
        ("help = true", "no option 'help' for a file"),
        ("no-force = true", "no option 'no-force' for a file; did you mean 'force'?"),
        ("[build]\nforce = true", "no option 'build' for a file"),
        ("max-lora-rank = 8.0", "max-lora-rank is 8.0, expected a whole number"),
        ("max-lora-rank = true", "max-lora-rank is True, expected a whole number"),
        ('max-lora-rank = "8"', "max-lora-rank is '8', expected a whole number"),
        ("force = 1", "force is 1, expected true or false"),
        ('force = "yes"', "force is 'yes', expected true or false"),
        ("model = 2026-01-01", "expected a string"),
        ('lora-dir = "a"', "lora-dir is 'a', expected a list of strings"),
        ('lora-dir = ["a", 1]', "lora-dir is ['a', 1], expected a list of strings"),
        ('dtype = "float8"', "dtype is 'float8'; choose from: float16, bfloat16, float32"),
        ('output = "a"\noutput-dir = "b"', "output-dir is there twice, under two names"),
        ("max_loras = 1\nmax-loras = 2", "max-loras is there twice, under two names"),
        ("force = true\nforce = true", "is not TOML: Cannot overwrite a value"),
        ("force", "is not TOML"),
        ("a = " + 9999 * "[", "is not TOML: maximum recursion depth exceeded"),
        ("\udcff", "is not TOML: 'utf-8' codec can't decode"),
    ],
)
def test_what_a_file_gets_wrong_is_refused_with_its_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "build.toml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit) as raised:
        main(["--config", str(file), "--print-config"])
    printed = capsys.readouterr()
    assert (raised.value.code, printed.out) == (2, "")
    assert printed.err.startswith(f"error: {file}")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", "nowhere.toml"])
    assert "No such file or directory: nowhere.toml" in capsys.readouterr().err


def test_without_a_model_the_next_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--lora-target-modules", "q_proj"])
    assert "nothing says which model to build; pass --model DIR" in capsys.readouterr().err


def test_a_path_that_is_no_text_cannot_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "caf\udce9", "--print-config"])
    assert "'caf\\udce9' is no text, and TOML holds nothing else" in capsys.readouterr().err


@pytest.mark.parametrize("option", IGNORED)
def test_an_option_of_tensorrt_llm_that_means_nothing_has_its_sentence(
    option: str, tmp_path: Path
) -> None:
    name = option.removeprefix("--")
    for key, value in ((name, "true"), (name.replace("-", "_"), '"enable"')):
        (tmp_path / "a.toml").write_text(f"{key} = {value}\ndtype = 'float32'")
        values, notes = read_config(tmp_path / "a.toml", build_parser())
        assert values == {"dtype": "float32"}
        assert notes == [f"{tmp_path / 'a.toml'}: {option} is left out: {IGNORED[option]}"]


def test_a_dtype_of_the_plugin_has_its_sentence_and_a_kind_of_node_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('lora-plugin = "float16"')
    values, (note,) = read_config(tmp_path / "a.toml", build_parser())
    assert values == {}
    assert "--lora-plugin is left out: LoRA computes in --dtype" in note
    assert read(tmp_path / "a.toml", 'lora-plugin = "native"') == {"lora_plugin": "native"}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_of_tensorrt_llm_that_asks_for_what_is_not_there_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(f"{option.removeprefix('--')} = 4")
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path / "a.toml")])
    assert f"a.toml: {option}: {REFUSED[option]}" in capsys.readouterr().err
