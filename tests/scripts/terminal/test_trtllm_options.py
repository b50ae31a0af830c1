"""A command line of TensorRT-LLM: what means nothing is left out with a sentence, or refused."""

import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.terminal.trtllm_options import IGNORED, REFUSED, without_trtllm_options

OURS = ["--model", "m", "--max-lora-rank", "8", "--lora-target-modules", "attn_q", "attn_k"]


def test_a_command_line_of_ours_is_as_it_was() -> None:
    words = ["first", *OURS, "--lora-plugin", "native", "--force"]
    assert without_trtllm_options(words) == (words, [])


@pytest.mark.parametrize("option", IGNORED)
def test_an_option_that_means_nothing_is_left_out_with_its_value(option: str) -> None:
    for written in ([option, "enable"], [f"{option}=enable"], [option]):
        kept, notes = without_trtllm_options([*written, *OURS])
        assert kept == OURS
        assert notes == [f"{option} is left out: {IGNORED[option]}"]


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_asks_for_what_is_not_there_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: .*; (pass|leave|merge)"):
        without_trtllm_options([*OURS, option, "2"])


def test_a_dtype_of_the_plugin_is_left_out_and_a_kind_of_node_is_not() -> None:
    for written in (["--lora-plugin", "float16"], ["--lora-plugin=bfloat16"]):
        kept, (note,) = without_trtllm_options([*OURS, *written])
        assert kept == OURS
        assert note.startswith("--lora-plugin is left out: LoRA computes in --dtype")


@pytest.mark.parametrize("option", ["--tp-size", "--pp-size"])
def test_one_gpu_is_what_there_is_and_more_are_refused(option: str) -> None:
    for written in ([option, "1"], [f"{option}=1"]):
        kept, (note,) = without_trtllm_options([*written, *OURS])
        assert kept == OURS
        assert note == f"{option} is left out: an engine runs on one GPU"
    with pytest.raises(ConfigError, match=f"^{option}: .* parallelism is not built; "):
        without_trtllm_options([*OURS, f"{option}=2"])


THEIRS = ("--tp-size", "--pp-size", "--model-config", "--reduce-fusion", "--multiple-profiles")


@pytest.mark.parametrize("option", THEIRS)
def test_every_option_of_an_older_command_line_has_a_sentence(option: str) -> None:
    assert option in {**IGNORED, **REFUSED}
