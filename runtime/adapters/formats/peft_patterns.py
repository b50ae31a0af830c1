"""Bounded evaluation of PEFT's module regexes from untrusted configs.

A regex with catastrophic backtracking would hang the process, so only those of a few forms are
used, with few repetitions, none of a group, and not with too many paths.
Plain names, which may be thousands, are looked up.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

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
        self._names: _Names = defaultdict(dict)
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


_Names = defaultdict[tuple[int, tuple[int, ...], bool], dict[str, int]]


def ends_of(path: str) -> Iterator[str]:
    """Yield the path, and what follows each of its dots."""
    yield path
    yield from (path[i + 1 :] for i, sign in enumerate(path) if sign == ".")
