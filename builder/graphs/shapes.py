"""Ranges of a graph's dynamic dimensions, as `--shapes` has them, and the profile they make."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.tensorrt.profiles import Symbols, range_of
from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, listed
from trt_lora.runtime.manifest import Binding, Range

PROFILE = "graph"  # the only one

_RANGE = re.compile(r"(?P<name>[^=]+)=(?P<sizes>\d{1,9}(:\d{1,9}:\d{1,9})?)")
_TIMES = re.compile(r"(?P<factor>\d{1,9})\s*\*\s*(?P<symbol>.+)|(?P<same>.+)")


def read_shapes(given: Iterable[str]) -> Symbols:
    """Return the sizes (min, opt, max) of every symbol, of `batch=1:2:8` or `height=64`.

    Raises:
        ConfigError: one is written otherwise, is there twice, or does not rise from 1.
    """
    symbols: Symbols = {}
    for text in given:
        match = _RANGE.fullmatch(text)
        if match is None or match["name"] in symbols:
            raise ConfigError(
                f"--shapes {text}: expected each name once, with its smallest, usual and largest "
                "size, such as batch=1:2:8, or with one size, such as height=64"
            )
        sizes = [*map(int, match["sizes"].split(":"))]
        low, opt, high = sizes if len(sizes) > 1 else sizes * 3
        if not 1 <= low <= opt <= high:
            raise ConfigError(f"--shapes {text}: expected 1 <= smallest <= usual <= largest")
        symbols[match["name"]] = (low, opt, high)
    return symbols


def graph_profile(
    inputs: Sequence[Binding], lora_inputs: Collection[str], symbols: Symbols, lora: ResolvedLoRA
) -> dict[str, Range]:
    """Return the range of every input, those of LoRA from rank 1 to the largest.

    Args:
        inputs: what the graph takes.
        lora_inputs: the names of those of LoRA.
        symbols: as `read_shapes` returns them; a size `8*h` is that many times the symbol h.
        lora: its ranks.

    Raises:
        ConfigError: a size has no range, or a range is of none.
    """
    used = {
        size: (*_factor(size), binding.name)
        for binding in inputs
        if binding.name not in lora_inputs
        for size in binding.shape
        if isinstance(size, str)
    }
    check_symbols({symbol: name for _, symbol, name in used.values()}, symbols)
    sizes = {
        size: (times * symbols[symbol][0], times * symbols[symbol][1], times * symbols[symbol][2])
        for size, (times, symbol, _) in used.items()
    }
    rank = (MIN_RANK, lora.opt_rank, lora.max_rank)
    return {binding.name: range_of(binding, sizes, rank) for binding in inputs}


def check_symbols(used: Mapping[str, str], symbols: Collection[str]) -> None:
    """Compare the symbols that inputs have, each with one of those, with what has a range.

    Raises:
        ConfigError: one has none, or a range is of none.
    """
    if missing := [symbol for symbol in used if symbol not in symbols]:
        names = listed([f"{symbol} (of {used[symbol]})" for symbol in missing])
        raise ConfigError(
            f"nothing says how large {names} may be; pass --shapes "
            f"{' '.join(f'{symbol}=1:2:8' for symbol in missing)} with sizes of your own, or "
            "--flavour none for an engine without a plan"
        )
    if unknown := [symbol for symbol in symbols if symbol not in used]:
        raise ConfigError(
            f"--shapes {unknown[0]}: no input of the graph has such a size; the sizes are: "
            f"{', '.join(used) or 'all fixed'}{did_you_mean(unknown[0], used)}"
        )


def _factor(size: str) -> tuple[int, str]:
    """A size as a multiple of a symbol; of other sums than that, the whole text is a symbol."""
    match = _TIMES.fullmatch(size)
    if match is None or match["same"]:
        return 1, size
    return int(match["factor"]), match["symbol"]
