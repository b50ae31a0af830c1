"""PEFT's patterns for modules, from files that nobody has checked.

They are regular expressions. One that backtracks without end would hang the process, so only those
are used whose work is bounded: few repetitions, none of a group, and not too many for all paths.
Plain names, which may be thousands, are looked up.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

_MAX_LENGTH, _MAX_PATH = 1024, 256
_MAX_REPEATS, _MAX_OPTIONS, _MAX_GROUPS = 3, 4, 4
MAX_STEPS = 100_000_000  # of the regular expressions' engine: some seconds

_PLAIN = re.compile(r"\^?[\w.-]+")  # a dot is any character, all others are themselves
# A repeated group, a back reference, an extension but (?:, a set that Python may read otherwise.
_REFUSED = re.compile(r"\)[*+{]|\\[1-9]|\(\?(?!:)|\[\[|--|&&|~~|\|\|")


def pattern_problem(pattern: str) -> str:
    """Return why a pattern cannot be used; empty if it can."""
    counts = (_repeats(pattern), _options(pattern), pattern.count("("))
    limits = (_MAX_REPEATS, _MAX_OPTIONS, _MAX_GROUPS)
    if (
        len(pattern) > _MAX_LENGTH
        or _REFUSED.search(pattern)
        or any(count > limit for count, limit in zip(counts, limits, strict=True))
    ):
        return "it is too complex to be evaluated safely; write the modules' names instead"
    try:
        re.compile(pattern)  # by itself: "a)(b" is none, but would be one between brackets
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _repeats(pattern: str) -> int:
    return sum(pattern.count(sign) for sign in "*+{")


def _options(pattern: str) -> int:
    return pattern.count("?") - pattern.count("(?:")


class ModulePatterns:
    r"""`rank_pattern` or `alpha_pattern`: the first pattern that names a path's end decides.

    PEFT's rule is `re.match(rf"(.*\.)?({pattern})$", path)` (`get_pattern_key`).
    """

    def __init__(self, patterns: Mapping[str, float]) -> None:
        """Sort the patterns, which have no `pattern_problem`, into names and expressions."""
        self._values = list(patterns.values())
        self._names: _Names = defaultdict(dict)
        self._expressions: list[tuple[int, str, re.Pattern[str]]] = []
        for order, pattern in enumerate(patterns):
            if _PLAIN.fullmatch(pattern):
                name = pattern.removeprefix("^")
                dots = tuple(i for i, sign in enumerate(name) if sign == ".")
                place = (len(name), dots, pattern.startswith("^"))
                self._names[place].setdefault(name, order)
            else:
                compiled = re.compile(rf"(.*\.)?(?:{pattern})$")
                self._expressions.append((order, pattern, compiled))

    def value(self, path: str, default: float) -> float:
        """Return the value of the first pattern that names the path's end."""
        if not self._values:
            return default
        first = min(self._named(path), default=len(self._values))
        for order, _, compiled in self._expressions:
            if order > first:
                break
            if len(path) <= _MAX_PATH and compiled.match(path):
                return self._values[order]
        return self._values[first] if first < len(self._values) else default

    def _named(self, path: str) -> Iterator[int]:
        """The orders of the names that match."""
        ends = {len(end): end for end in _ends(path)}
        for (length, dots, whole), names in self._names.items():
            end = path if whole else ends.get(length)
            if end is not None and len(end) == length:
                signs = ["." if i in dots else sign for i, sign in enumerate(end)] if dots else end
                order = names.get("".join(signs))
                if order is not None:
                    yield order

    def steps(self, paths: Iterable[str]) -> int:
        """Estimate the steps of matching every expression with every path."""
        counts = [(_repeats(pattern), _options(pattern)) for _, pattern, _ in self._expressions]
        known = [path for path in paths if len(path) <= _MAX_PATH]
        return sum(_steps(path, *count) for path in known for count in counts)


def _steps(path: str, repeats: int, options: int) -> int:
    """Estimate the steps of matching one expression with a path, after each of its dots."""
    ways: int = math.comb(len(path), repeats) * 2**options
    return len(path) + (path.count(".") + 1) * ways


_Names = defaultdict[tuple[int, tuple[int, ...], bool], dict[str, int]]


def target_rule(
    targets: object, excluded: object, layers: object, layers_pattern: object
) -> Callable[[str], bool] | None:
    """Return PEFT's rule for which paths an adapter targets (`check_target_module_exists`).

    Args:
        targets: `target_modules`, a list of names or one pattern.
        excluded: `exclude_modules`, likewise.
        layers: `layers_to_transform`, numbers; they restrict a list of names.
        layers_pattern: what stands before a layer's number.

    Returns:
        The rule, or None if the fields do not say, or only by a pattern too complex to evaluate.
    """
    # Named by its whole path, a module is taken whatever its layer.
    whole = frozenset(map(str, targets)) if isinstance(targets, list) else ()
    named, kept_out = _names_rule(targets), _names_rule(excluded) if excluded else _never
    layer = _layer_rule(layers, layers_pattern) if isinstance(targets, list) else _always
    if named is None or kept_out is None or layer is None:
        return None
    return lambda path: (
        len(path) <= _MAX_PATH
        and not kept_out(path)
        and named(path)
        and (path in whole or layer(path))
    )


def _names_rule(names: object) -> Callable[[str], bool] | None:
    if isinstance(names, str) and not pattern_problem(names):
        pattern, count = re.compile(names), (_repeats(names), _options(names))
        limit = MAX_STEPS // 1000  # one path of many
        return lambda path: _steps(path, *count) < limit and pattern.fullmatch(path) is not None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        known = frozenset(names)
        return lambda path: any(end in known for end in _ends(path))
    return None


def _ends(path: str) -> Iterator[str]:
    """The path, and what follows each of its dots."""
    yield path
    yield from (path[i + 1 :] for i, sign in enumerate(path) if sign == ".")


def _layer_rule(layers: object, prefixes: object) -> Callable[[str], bool] | None:
    if layers is None or layers == []:
        return _always
    numbers = layers if isinstance(layers, list) else [layers]
    whole = [number for number in numbers if isinstance(number, int)]
    if len(whole) < len(numbers):
        return None
    if not prefixes:
        return _layer_test(whole, [r".*?\.[^.]*"])
    written = prefixes if isinstance(prefixes, list) else [prefixes]
    if any(not isinstance(prefix, str) or pattern_problem(prefix) for prefix in written):
        return None
    return _layer_test(whole, [rf"(?:^|.*?\.)(?:{prefix})" for prefix in written])


def _layer_test(numbers: Collection[int], prefixes: list[str]) -> Callable[[str], bool]:
    patterns = [re.compile(rf"{prefix}\.(?P<layer>[0-9]{{1,9}})\.") for prefix in prefixes]

    def test(path: str) -> bool:
        found = (match for pattern in patterns if (match := pattern.match(path)))
        match = next(found, None)
        return match is not None and int(match["layer"]) in numbers

    return test


def _always(path: str) -> bool:
    return True


def _never(path: str) -> bool:
    return False
