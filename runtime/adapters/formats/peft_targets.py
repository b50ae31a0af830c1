"""PEFT's rules for modules, evaluated without the model: `target_modules`, rank and alpha patterns.

PEFT applies no tensor of a module that the config does not target, and says nothing about it.

A regex with catastrophic backtracking would hang the process, so of those in an untrusted config
only a few forms are used, with few repetitions, none of a group, and not with too many paths.
Plain names, which may be thousands, are looked up.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from trt_lora.plugins.contract.modules import (
    ALL_LINEAR,
    EMBEDDING,
    EXPERT_PARAMETERS,
    HEAD,
    is_experts,
    module_of,
)
from trt_lora.plugins.messages import listed, shown

_MAX_LENGTH = 1024
MAX_PATH = 256  # of what a pattern is matched with
_MAX_REPEATS, _MAX_GROUPS = 3, 4
MAX_STEPS = 100_000_000  # of the regular expressions' engine: some seconds

_PLAIN = re.compile(r"\^?[\w.-]+")  # a dot is any character, all others are themselves
# Characters and sets of them, alternatives, groups that nothing repeats.
_FORM = re.compile(
    r"(?:(?:[\w.-]|\\[^0-9]|\[\^?[\w.-]+\])(?:[*+]\??|\?)?|[\^$|]|\((?:\?:)?|\)(?![*+?]))*"
)
_REPEAT = re.compile(r"[*+]\??|(?<!\()\?")


def pattern_problem(pattern: str) -> str:
    """Return why a pattern cannot be used; empty if it can."""
    if (
        len(pattern) > _MAX_LENGTH
        or not _FORM.fullmatch(pattern)
        or len(_REPEAT.findall(pattern)) > _MAX_REPEATS
        or pattern.count("(") > _MAX_GROUPS
    ):
        return "it is too complex to be evaluated safely; write the modules' names instead"
    try:
        re.compile(pattern)  # by itself: "a)(b" is none, but would be one between brackets
    except re.error as error:
        return str(error)
    return ""


class BoundedPattern:
    """A pattern without a `pattern_problem`, and what it costs to match it."""

    def __init__(self, pattern: str, before: str = "", after: str = "") -> None:
        """Compile it between parts of an expression of ours."""
        self.match = re.compile(f"{before}{pattern}{after}").match
        self._repeats = len(_REPEAT.findall(pattern))

    def steps(self, path: str, starts: int = 1) -> int:
        """Estimate the steps of a match that is tried from as many places."""
        return math.comb(len(path), self._repeats) * starts


class ModulePatterns:
    r"""`rank_pattern` or `alpha_pattern`: the first pattern that names a path's end decides.

    PEFT's rule is `re.match(rf"(.*\.)?({pattern})$", path)` (`get_pattern_key`).
    """

    def __init__(self, patterns: Mapping[str, float]) -> None:
        """Sort the patterns, which have no `pattern_problem`, into names and expressions."""
        self._values = list(patterns.values())
        self._names = defaultdict[tuple[int, tuple[int, ...], bool], dict[str, int]](dict)
        self._expressions: list[tuple[int, BoundedPattern]] = []
        for order, pattern in enumerate(patterns):
            if _PLAIN.fullmatch(pattern):
                name = pattern.removeprefix("^")
                dots = tuple(i for i, sign in enumerate(name) if sign == ".")
                place = (len(name), dots, pattern.startswith("^"))
                self._names[place].setdefault(name, order)
            else:
                self._expressions.append((order, BoundedPattern(pattern, r"(.*\.)?(?:", ")$")))

    def value(self, path: str, default: float) -> float:
        """Return the value of the first pattern that names the path's end."""
        first = min(self._named(path), default=len(self._values))
        for order, pattern in self._expressions:
            if order < first and len(path) <= MAX_PATH and pattern.match(path):
                return self._values[order]
        return self._values[first] if first < len(self._values) else default

    def _named(self, path: str) -> Iterator[int]:
        """The orders of the names that match."""
        ends = {len(end): end for end in ends_of(path)} if self._names else {}
        for (length, dots, whole), names in self._names.items():
            end = path if whole else ends.get(length)
            if end is not None and len(end) == length:
                signs = ["." if i in dots else sign for i, sign in enumerate(end)] if dots else end
                if (order := names.get("".join(signs))) is not None:
                    yield order

    def steps(self, paths: Iterable[str]) -> int:
        """Estimate the steps of matching every expression with every path, after each dot."""
        return sum(
            len(path) + pattern.steps(path, path.count(".") + 1)
            for path in paths
            if len(path) <= MAX_PATH
            for _, pattern in self._expressions
        )


def ends_of(path: str) -> Iterator[str]:
    """Yield the path, and what follows each of its dots."""
    yield path
    yield from (path[i + 1 :] for i, sign in enumerate(path) if sign == ".")


# ---------------------------------------------------------------------------------- target modules


PARAMETERS = "target_parameters"
FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", PARAMETERS)

Answer = bool | None  # None: only the model tells, or a pattern is too complex to be evaluated
Rule = Callable[[str], Answer]

_NO_LINEARS = (HEAD, EMBEDDING)  # what PEFT leaves out of all-linear
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
    names, excluded, layers, pattern, parameters = (fields.get(name) for name in FIELDS)
    limit = MAX_STEPS // max(modules, _USUAL)
    named, kept_out = _named(names, limit), _named(excluded or [], limit)
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        named = _is_no_head
    if names is None and parameters:  # PEFT then chooses no modules of its own
        named = _named([], limit)
    in_layers = _in_layers(names, layers, pattern, limit)

    def rule(path: str) -> Answer:
        named_there = is_parameter(path, parameters or ()) or expert_parameters(
            path.removesuffix(".base_layer"), parameters or ()
        )
        if named_there:  # of which the other fields say nothing
            return True
        out = kept_out(path)
        answers = (None if out is None else not out, named(path), in_layers(path))
        return False if False in answers else None if None in answers else True

    return rule


def is_parameter(path: str, parameters: Collection[str]) -> bool:
    """Whether a matrix of experts at `path`, or else the weight of its module, is targeted."""
    name = path if is_experts(path) else f"{path}.weight"
    return any(end in parameters for end in ends_of(name))


def expert_parameters(path: str, parameters: Collection[str]) -> list[str]:
    """Return the names of those parameters of the experts at `path` that are targeted."""
    whole = {name: f"{path}.{name}" for name in EXPERT_PARAMETERS}
    return [n for n, site in whole.items() if is_experts(site) and is_parameter(site, parameters)]


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
    return module is None or module.name not in _NO_LINEARS


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
