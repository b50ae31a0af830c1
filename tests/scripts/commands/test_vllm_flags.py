"""vLLM's flags: each is effective, noted or refused, and the page says what `serve` does."""

import argparse
from pathlib import Path

import pytest
from support.vllm_flags_page import PAGE, page

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.commands import serve
from trt_lora.scripts.commands.vllm_flags import (
    VllmFlag,
    add_vllm_flags,
    check_vllm_flags,
    normalised,
    vllm_flags,
)

MAKE = "make it: PYTHONPATH=tests:src .venv/bin/python -m support.vllm_flags_page"


def given(*words: str) -> argparse.Namespace:
    """What a parser with vLLM's flags alone makes of words."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_vllm_flags(parser)
    return parser.parse_args(normalised(words))


def noted(*words: str) -> list[str]:
    return check_vllm_flags(given(*words))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        noted(*words)
    return str(caught.value)


def of_effect(*effects: str) -> list[VllmFlag]:
    return [flag for flag in vllm_flags() if flag.effect in effects]


def words_of(flag: VllmFlag) -> list[str]:
    """The flag as a user gives it, with a value that asks for something."""
    return [flag.names[0], *(["17"] if flag.values != "0" else [])]


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), MAKE


def test_the_table_is_sorted_and_each_line_says_what_and_why() -> None:
    names = [flag.names[0] for flag in vllm_flags()]
    assert names == sorted(set(names))
    for flag in vllm_flags():
        assert flag.values in ("0", "1", "+", "?"), flag
        assert flag.effect in ("effective", "none", "refused"), flag
        assert flag.why, flag
        assert "|" not in flag.why, flag
        assert not flag.neutral or flag.effect == "refused", flag
        assert flag.effect == "effective" or flag.values != "0" or flag.neutral in ([], ["off"])


def test_help_shows_none_of_them() -> None:
    parser = argparse.ArgumentParser()
    bare = parser.format_help()
    add_vllm_flags(parser)
    assert parser.format_help() == bare


def test_nothing_is_noted_where_nothing_is_given() -> None:
    assert noted() == []


@pytest.mark.parametrize("flag", of_effect("none"), ids=lambda flag: flag.names[0])
def test_a_flag_without_effect_is_one_line_under_each_of_its_names(flag: VllmFlag) -> None:
    (line,) = noted(*words_of(flag))
    assert line.startswith(flag.names[0])
    assert line.endswith(f"has no effect: {flag.why}")
    for name in flag.names:
        assert noted(name, *words_of(flag)[1:]) == [line]


@pytest.mark.parametrize("flag", of_effect("refused"), ids=lambda flag: flag.names[0])
def test_a_refused_flag_is_an_error_and_its_neutral_values_are_none(flag: VllmFlag) -> None:
    words = words_of(flag)
    assert refusal(*words) == f"{' '.join(words)} is not supported: {flag.why}"
    for value in flag.neutral:
        neutral = flag.negations[:1] if flag.values == "0" else [flag.names[0], value]
        assert noted(*neutral) == []


def test_a_refusal_has_the_value_and_what_to_do() -> None:
    assert refusal("-tp", "2") == (
        "--tensor-parallel-size 2 is not supported: an engine runs on one GPU; start one server "
        "for each GPU behind a router"
    )
    assert noted("-tp", "1", "--quantization", "none", "--data-parallel-rank=0") == []


def test_what_is_given_last_counts_as_with_vllm() -> None:
    assert noted("-tp", "2", "-tp", "1", "--headless", "--no-headless") == []


def test_an_empty_value_and_none_ask_for_nothing() -> None:
    assert noted("--chat-template", "", "--tool-call-parser=None") == []


def test_a_switch_is_noted_as_it_was_switched() -> None:
    for words in ("--no-enable-chunked-prefill", "--disable-chunked-prefill"):
        (line,) = noted(words)
        assert line.startswith("--no-enable-chunked-prefill has no effect: ")
    (line,) = noted("--disable-log-requests")
    assert line.startswith("--no-enable-log-requests ")


def test_a_token_is_not_shown_and_a_long_value_is_cut() -> None:
    (line,) = noted("--hf-token", "hf_secret")
    assert "secret" not in line
    assert noted("--hf-token") == [line]
    assert len(refusal("--hf-overrides", "{" * 1000)) < 250


def test_words_are_read_as_vllm_reads_them() -> None:
    words = ["--max_model_len=8", "--lora_modules", "a_b=/c_d", "--uds", "/a_b.c", "-1.5"]
    expected = ["--max-model-len=8", "--lora-modules", "a_b=/c_d", "--uds", "/a_b.c", "-1.5"]
    assert normalised(words) == expected
    assert normalised(["--hf_overrides.a_b.c", "x_y"]) == ["--hf-overrides=a_b.c=x_y"]
    assert normalised(["-cc.mode=3", "--", "--a_b"]) == ["-cc=mode=3", "--", "--a_b"]
    assert normalised(["--hf-overrides.a"]) == ["--hf-overrides=a="]
    assert refusal("--speculative-config.method", "ngram").startswith(
        "--speculative-config method=ngram is not supported"
    )


@pytest.mark.parametrize("words", [["-O3"], ["-O", "3"], ["-O=3"], ["--optimization_level", "3"]])
def test_the_level_of_optimization_has_no_effect(words: list[str]) -> None:
    (line,) = noted(*words)
    assert line.startswith("--optimization-level 3 has no effect: ")


def served(*words: str) -> argparse.Namespace:
    """What the parser of `serve` makes of words; it raises where a flag is declared twice."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    serve.add_options(parser)
    return parser.parse_args(normalised(words))


@pytest.mark.parametrize("flag", of_effect("effective"), ids=lambda flag: flag.names[0])
def test_serve_knows_the_effective_flags(flag: VllmFlag) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_options(parser)
    takes = {name: action for action in parser._actions for name in action.option_strings}
    for name in flag.names:
        assert (takes[name].nargs == 0) == (flag.values == "0")
        assert (takes[name].nargs == "+") == (flag.values == "+")


def test_effective_switches_are_switched_off_as_with_vllm() -> None:
    assert served("x").enable_request_id_headers is False
    assert served("x", "--enable-request-id-headers").enable_request_id_headers is True
    for off in ("--no-enable-request-id-headers", "--disable-request-id-headers"):
        assert served("x", "--enable-request-id-headers", off).enable_request_id_headers is False


def test_a_command_line_of_vllm_starts_serve() -> None:
    words = "-tp 1 --gpu-memory-utilization 0.9 --enable-lora --port 9000 --max_model_len 64 -O3"
    args = served("engines/x", *words.split())
    assert args.engine == Path("engines/x")
    assert args.port == 9000
    assert [line.split()[0] for line in check_vllm_flags(args)] == [
        "--gpu-memory-utilization",
        "--optimization-level",
    ]
