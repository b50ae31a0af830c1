"""Messages show the beginning of what is long, and say how much was left out."""

from trt_lora.plugins.messages import did_you_mean, listed, shown


def test_a_short_list_is_whole() -> None:
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b, c"


def test_a_long_list_says_how_many_more_there_are() -> None:
    assert listed([*"abcde"]) == "a, b, c and 2 more"
    assert listed([*"abcd"], separator="; ", last="; ") == "a; b; c; 1 more"


def test_a_long_value_is_shortened() -> None:
    assert shown("x") == "'x'"
    assert len(shown("x" * 10_000)) <= 200
    assert shown(list(range(1000))).endswith("18, 19, ...]")


def test_the_name_that_was_meant_is_suggested_and_nothing_far_from_it() -> None:
    choices = ("max-lora-rank", "max-loras", "dtype")
    assert did_you_mean("max-lora-rnk", choices) == "; did you mean 'max-lora-rank'?"
    assert did_you_mean("zzz", choices) == ""
