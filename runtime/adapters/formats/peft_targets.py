"""PEFT's target module rule, evaluated without the model.

PEFT applies no tensor of a module that the config does not target, and says nothing about it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from trt_lora.plugins.contract.modules import ALL_LINEAR, module_of
from trt_lora.runtime.adapters.formats.peft_patterns import (
    MAX_PATH,
    MAX_STEPS,
    ends_of,
    pattern_freedom,
    pattern_problem,
    pattern_ways,
)

FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")

Answer = bool | None  # None: only the model tells, or a pattern is too complex to be evaluated
Rule = Callable[[str], Answer]

_HEAD = "lm_head"  # what PEFT leaves out of all-linear, in the table of modules
_USUAL = 1000  # modules that patterns get all their time for
# PEFT shortens a list of so many names by those of the model, and a short name is asked its layer.
_SHORTENED = 20


def target_rule(fields: Mapping[str, Any], modules: int = _USUAL) -> Rule:
    """Return PEFT's rule for which paths an adapter targets (`check_target_module_exists`).

    Args:
        fields: of the config; those of FIELDS are read.
        modules: how many paths it will be asked about, which share the time for patterns.
    """
    names, excluded, layers, pattern = (fields.get(name) for name in FIELDS)
    limit = MAX_STEPS // max(modules, _USUAL)
    named, kept_out = _named(names, limit), _named(excluded, limit) if excluded else _never
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        named = _is_no_head
    in_layers = _in_layers(names, layers, pattern, limit) if layers not in (None, []) else _always

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
        return _unknown
    pattern, freedom = re.compile(names), pattern_freedom(names)

    def matches(path: str) -> Answer:
        if len(path) > MAX_PATH or pattern_ways(path, freedom) > limit:
            return None
        return pattern.fullmatch(path) is not None

    return matches


def _is_no_head(path: str) -> bool:
    module = module_of(path)
    return module is None or module.name != _HEAD


def _in_layers(names: object, layers: object, prefixes: object, limit: int) -> Rule:
    """Rule of `layers_to_transform`; PEFT applies it only to names in a list."""
    if not isinstance(names, list):
        return _always
    numbers = layers if isinstance(layers, list) else [layers]
    patterns = _layer_patterns(prefixes)
    if patterns is None or not all(isinstance(number, int) for number in numbers):
        return _unknown
    whole = frozenset(map(str, names))  # a module that is named by its whole path has any layer

    def rule(path: str) -> Answer:
        starts = path.count(".") + 1
        if len(path) > MAX_PATH or any(pattern_ways(path, f) * starts > limit for _, f in patterns):
            return None
        match = next((found for regex, _ in patterns if (found := regex.match(path))), None)
        if match and match["layer"] and int(match["layer"]) in numbers:
            return True
        if path in whole:
            return True if len(whole) < _SHORTENED else None
        return False

    return rule


def _layer_patterns(prefixes: object) -> list[tuple[re.Pattern[str], tuple[int, int]]] | None:
    """PEFT's patterns for a layer's number, each with the freedom of what its config says."""
    if not prefixes:
        return [(re.compile(r".*?\.[^.]*\.(?P<layer>\d+)\."), (0, 0))]
    written = prefixes if isinstance(prefixes, list) else [prefixes]
    usable = [p for p in written if isinstance(p, str) and not pattern_problem(p)]
    if len(usable) < len(written):
        return None
    found = [re.compile(rf"(?:^|.*?\.){prefix}\.(?P<layer>\d+)\.") for prefix in usable]
    return list(zip(found, map(pattern_freedom, usable), strict=True))


def _always(path: str) -> bool:
    return True


def _never(path: str) -> bool:
    return False


def _unknown(path: str) -> None:
    return None
