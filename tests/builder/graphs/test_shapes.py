"""Ranges of dynamic sizes, and the profile that they make."""

import pytest

from trt_lora.builder.graphs.shapes import graph_profile, read_shapes
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.targets import Targets
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import Binding, Range

LORA = ResolvedLoRA(Targets({}), max_rank=32, opt_rank=8)
INPUTS = (
    Binding("sample", "float32", ("batch", 4, "8*h", "8 * w")),
    Binding("step", "float32", ()),
    Binding("lora_A_fc", "float32", (4, "rank_fc")),
    Binding("lora_B_fc", "float32", ("rank_fc", 2)),
)
NAMES = ("lora_A_fc", "lora_B_fc")


def test_a_size_may_be_a_multiple_of_its_symbol() -> None:
    symbols = read_shapes(["batch=1:2:8", "h=2:4:8", "w=3"])
    assert symbols == {"batch": (1, 2, 8), "h": (2, 4, 8), "w": (3, 3, 3)}
    assert graph_profile(INPUTS, NAMES, symbols, LORA) == {
        "sample": Range((1, 4, 16, 24), (2, 4, 32, 24), (8, 4, 64, 24)),
        "step": Range((), (), ()),
        "lora_A_fc": Range((4, 1), (4, 8), (4, 32)),
        "lora_B_fc": Range((1, 2), (8, 2), (32, 2)),
    }


def test_what_has_no_range_and_what_is_no_size_is_named() -> None:
    with pytest.raises(ConfigError, match=r"how large h \(of sample\), w \(of sample\) may be"):
        graph_profile(INPUTS, NAMES, read_shapes(["batch=1"]), LORA)
    symbols = read_shapes(["batch=1", "h=1", "w=1", "rank_fc=4"])
    with pytest.raises(ConfigError, match=r"--shapes rank_fc: .*the sizes are: batch, h, w"):
        graph_profile(INPUTS, NAMES, symbols, LORA)


def test_a_sum_of_symbols_is_a_name_of_its_own() -> None:
    inputs = (Binding("mask", "int64", ("batch", "past + tokens")),)
    ranges = graph_profile(inputs, (), read_shapes(["batch=1", "past + tokens=1:4:9"]), LORA)
    assert ranges["mask"].max == (1, 9)


@pytest.mark.parametrize("text", ["h", "=1", "h=", "h=1:2", "h=0", "h=3:2:4", "h=1:4:3", "h=-1"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shapes"):
        read_shapes([text])
    with pytest.raises(ConfigError, match="each name once"):
        read_shapes(["h=1", "h=2"])
