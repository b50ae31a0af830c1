"""PEFT's target module rule, evaluated without the model, and the tensors that it leaves out.

PEFT applies no tensor of a module that the config does not target, and says nothing about it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from trt_lora.plugins.contract.modules import ALL_LINEAR, module_of
from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.adapters.formats.peft_patterns import (
    MAX_PATH,
    MAX_STEPS,
    BoundedPattern,
    ends_of,
    pattern_problem,
)

FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")

Answer = bool | None  # None: only the model tells, or a pattern is too complex to be evaluated
Rule = Callable[[str], Answer]

_HEAD = "lm_head"  # what PEFT leaves out of all-linear, in the table of modules
_USUAL = 1000  # modules that patterns get all their time for
# PEFT shortens a list of so many names by those of the model, and a short name is asked its layer.
_SHORTENED = 20
_LAYER = r"\.(?P<layer>\d+)\."

_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_.*")  # of any kind
_UNTARGETED = "its config does not target the module, so that PEFT does not apply it either"


class Targeting(NamedTuple):
    """What a PEFT config says of its own file, in the order of `Adapter`'s fields."""

    ignored: Mapping[str, str]  # tensor -> why it is not applied
    targets: Rule
    warnings: tuple[str, ...]


def targeting_of(fields: Mapping[str, Any], names: Collection[str]) -> Targeting:
    """Return what the fields of a config say of tensors of these names."""
    matches = ((name, _TENSOR.fullmatch(name)) for name in names)
    paths = {name: match["path"] for name, match in matches if match}
    rule = cache(target_rule(fields, len(paths)))
    ignored = {name: _UNTARGETED for name, path in paths.items() if rule(path) is False}
    untold = list(dict.fromkeys(path for path in paths.values() if rule(path) is None))
    return Targeting(ignored, rule, tuple(_warnings(ignored, untold, fields)))


def _warnings(
    ignored: Collection[str], untold: list[str], fields: Mapping[str, Any]
) -> Iterator[str]:
    if ignored:
        yield (
            f"{len(ignored)} of its tensors are ignored, as PEFT ignores them, for its config does "
            f"not target their modules: {listed([*ignored])}"
        )
    if untold:
        said = ", ".join(f"{name} is {shown(value)}" for name, value in fields.items())
        yield (
            f"whether its config targets {listed(untold)} cannot be told without the model "
            f"({said or 'it has no target_modules'}); they are applied, PEFT may ignore them"
        )


def target_rule(fields: Mapping[str, Any], modules: int = _USUAL) -> Rule:
    """Return PEFT's rule for which paths an adapter targets (`check_target_module_exists`).

    Args:
        fields: of the config; those of FIELDS are read.
        modules: how many paths it will be asked about, which share the time for patterns.
    """
    names, excluded, layers, pattern = (fields.get(name) for name in FIELDS)
    limit = MAX_STEPS // max(modules, _USUAL)
    named, kept_out = _named(names, limit), _named(excluded or [], limit)
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        named = _is_no_head
    in_layers = _in_layers(names, layers, pattern, limit)

    def rule(path: str) -> Answer:
        out = kept_out(path)
        answers = (None if out is None else not out, named(path), in_layers(path))
        return False if False in answers else None if None in answers else True

    return rule


def _named(names: object, limit: int) -> Rule:
    """Rule of `target_modules`: a list of path suffixes, or one regex for the whole path."""
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        known = frozenset(names)
        return lambda path: any(end in known for end in ends_of(path))
    if not isinstance(names, str) or pattern_problem(names):
        return lambda _: None
    pattern = BoundedPattern(names, "(?:", r")\Z")

    def matches(path: str) -> Answer:
        if len(path) > MAX_PATH or pattern.steps(path) > limit:
            return None
        return pattern.match(path) is not None

    return matches


def _is_no_head(path: str) -> bool:
    module = module_of(path)
    return module is None or module.name != _HEAD


def _in_layers(names: object, layers: object, prefixes: object, limit: int) -> Rule:
    """Rule of `layers_to_transform`; PEFT applies it only to names in a list."""
    if not isinstance(names, list) or layers in (None, []):
        return lambda _: True
    numbers = layers if isinstance(layers, list) else [layers]
    patterns = _layer_patterns(prefixes)
    if patterns is None or not all(isinstance(number, int) for number in numbers):
        return lambda _: None
    whole = frozenset(map(str, names))  # a module that is named by its whole path has any layer

    def rule(path: str) -> Answer:
        starts = path.count(".") + 1
        if len(path) > MAX_PATH or any(p.steps(path, starts) > limit for p in patterns):
            return None
        match = next((found for pattern in patterns if (found := pattern.match(path))), None)
        if match and match["layer"] and int(match["layer"]) in numbers:
            return True
        if path in whole:
            return True if len(whole) < _SHORTENED else None
        return False

    return rule


def _layer_patterns(prefixes: object) -> list[BoundedPattern] | None:
    """PEFT's patterns for a layer's number; None if one cannot be used."""
    if not prefixes:
        return [BoundedPattern("", r".*?\.[^.]*", _LAYER)]
    written = prefixes if isinstance(prefixes, list) else [prefixes]
    usable = [p for p in written if isinstance(p, str) and not pattern_problem(p)]
    if len(usable) < len(written):
        return None
    return [BoundedPattern(prefix, r"(?:^|.*?\.)", _LAYER) for prefix in usable]
