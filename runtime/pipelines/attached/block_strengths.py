"""Strengths of a UNet block by block, as diffusers' `set_adapters` takes them, by module paths.

`{"down": 0.9, "mid": 0.6, "up": {"block_0": 0.6, "block_1": [0.4, 0.8, 1.0]}}`: of all blocks with
attention on one side, of one block, or of each of its attentions. What is left out has 1.0. The
ResNet layer before an attention, and what changes a block's size with its first, have its strength:
https://huggingface.co/docs/diffusers/v0.42.0/tutorials/using_peft_for_inference
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, listed
from trt_lora.runtime.adapters.blend import prefixes_of

_SIDES = ("down", "up")
_LIKE_ATTENTIONS = ("attentions", "resnets", "motion_modules", "downsamplers", "upsamplers")


def block_strengths(
    given: Mapping[str, Any], config: Mapping[str, Any], paths: Collection[str]
) -> dict[str, float]:
    """Return strengths by prefixes of module paths.

    Args:
        given: by side, block and attention.
        config: the UNet's.
        paths: of the engine's sites; prefixes of none of them are left out.

    Raises:
        ConfigError: a side or block is unknown or has no attention, or there are not as many
            strengths as attentions.
    """
    _refuse_unknown(given, ("mid", *_SIDES), "adapter_weights of a UNet")
    found = {"mid_block.attentions.0": _one("mid", given.get("mid", 1.0))}
    for side in _SIDES:
        found |= _of_side(side, given.get(side, 1.0), config)
    here = {prefix for path in paths for prefix in prefixes_of(path)}
    return {"": 1.0} | {prefix: value for prefix, value in found.items() if prefix in here}


def _of_side(side: str, given: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """Strengths of one side's attentions, and of what goes with them."""
    kinds = config[f"{side}_block_types"]
    blocks = {f"block_{i}": i for i, kind in enumerate(kinds) if "Attn" in kind}
    by_block = given if isinstance(given, Mapping) else dict.fromkeys(blocks, given)
    _refuse_unknown(by_block, blocks, f"{side}, of whose blocks these have attentions")
    layers = config["layers_per_block"]
    counts = [layers] * len(kinds) if isinstance(layers, int) else [*layers]
    if side == "up":
        counts = [count + 1 for count in reversed(counts)]
    found = {}
    for name, number in blocks.items():
        values = _each(f"{side}.{name}", by_block.get(name, 1.0), counts[number])
        for index, value in enumerate(values):
            for kind in _LIKE_ATTENTIONS:
                found[f"{side}_blocks.{number}.{kind}.{index}"] = value
    return found


def _each(what: str, given: Any, count: int) -> list[float]:
    values = [*given] if isinstance(given, list | tuple) else [given]
    if len(values) == 1:
        values *= count
    if len(values) != count:
        raise ConfigError(f"{what} has {len(values)} strengths; expected 1, or {count}")
    return [number(what, value) for value in values]


def _one(what: str, given: Any) -> float:
    return _each(what, given, 1)[0]


def number(what: str, value: Any) -> float:
    """Return a strength.

    Raises:
        ConfigError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"the strength of {what} is {value!r}; expected a number")
    return float(value)


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(
            f"{unknown[0]!r} is none of {what}: {listed([*known])}{did_you_mean(unknown[0], known)}"
        )
