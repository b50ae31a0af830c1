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
