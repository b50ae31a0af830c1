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


OPTIONS = (
    *("--adapter", "--backend", "--config", "--json", "--lora-dir", "--lora-target-modules"),
    *("--max-batch-size", "--max-lora-rank", "--max-loras", "--output", "--revision", "--rounds"),
)
NEAR = {
    "--bakend": "--backend",
    "--adaptor": "--adapter",
    "--jsn": "--json",
    "--batch-size": "--max-batch-size",
    "--lora-modules": "--lora-target-modules",
    "--lora-rank": "--max-lora-rank",
    "--max-rank": "--max-lora-rank",
    "--max-lora": "--max-loras",
    "--outptu": "--output",
    "generat": "generate",
    "lsit": "list",
    "chta": "chat",
    "float61": "float16",
    "smollm3": "smollm2",
    "jason": "json",
    "pirat": "pirate",
}
FAR = (
    *("--model-config", "--multiple-profiles", "--reduce-fusion", "--tp-size", "--zzz"),
    *("--verbose", "--optimize", "xyz", "engine", "base", "adapters/json", "lora"),
)
WORDS = (*OPTIONS, "generate", "chat", "list", "inspect", "float16", "smollm2", "json", "pirate")


def test_the_name_that_was_meant_is_suggested() -> None:
    found = {name: did_you_mean(name, WORDS) for name in NEAR}
    assert found == {name: f"; did you mean {meant!r}?" for name, meant in NEAR.items()}


def test_nothing_is_suggested_that_is_far_from_the_name() -> None:
    assert {name: did_you_mean(name, WORDS) for name in FAR} == dict.fromkeys(FAR, "")
