"""Bounded evaluation of PEFT's module regexes from untrusted configs.

A regex with catastrophic backtracking would hang the process, so only those with bounded work are
used: few repetitions, none of a group, and not too many for all paths.
Plain names, which may be thousands, are looked up.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

_MAX_LENGTH = 1024
MAX_PATH = 256  # of what a pattern is matched with
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
            if len(path) <= MAX_PATH and compiled.match(path):
                return self._values[order]
        return self._values[first] if first < len(self._values) else default

    def _named(self, path: str) -> Iterator[int]:
        """The orders of the names that match."""
        ends = {len(end): end for end in ends_of(path)}
        for (length, dots, whole), names in self._names.items():
            end = path if whole else ends.get(length)
            if end is not None and len(end) == length:
                signs = ["." if i in dots else sign for i, sign in enumerate(end)] if dots else end
                order = names.get("".join(signs))
                if order is not None:
                    yield order

    def steps(self, paths: Iterable[str]) -> int:
        """Estimate the steps of matching every expression with every path, after each dot."""
        freedoms = [pattern_freedom(pattern) for _, pattern, _ in self._expressions]
        known = [path for path in paths if len(path) <= MAX_PATH]
        return sum(
            len(path) + (path.count(".") + 1) * pattern_ways(path, freedom)
            for path in known
            for freedom in freedoms
        )


def pattern_freedom(pattern: str) -> tuple[int, int]:
    """Return how many repetitions and how many options a pattern has."""
    return _repeats(pattern), _options(pattern)


def pattern_ways(path: str, freedom: tuple[int, int]) -> int:
    """Return in how many ways at most a pattern of that freedom is tried at a path."""
    ways: int = math.comb(len(path), freedom[0]) * 2 ** freedom[1]
    return ways


_Names = defaultdict[tuple[int, tuple[int, ...], bool], dict[str, int]]


def ends_of(path: str) -> Iterator[str]:
    """Yield the path, and what follows each of its dots."""
    yield path
    yield from (path[i + 1 :] for i, sign in enumerate(path) if sign == ".")
