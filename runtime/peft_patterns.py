"""PEFT's patterns for modules, from files that nobody has checked.

They are regular expressions. One that backtracks without end would hang the process, so only those
are used whose work is bounded: few repetitions, none of a group.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache

_MAX_LENGTH = 1024
_MAX_REPEATS, _MAX_OPTIONS, _MAX_GROUPS = 3, 4, 4
_MAX_PATH = 256
MAX_STEPS = 200_000_000  # of the regular expressions' engine: some seconds

_UNBOUNDED = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=")  # a repeated group, a back reference


def pattern_problem(pattern: str) -> str:
    """Return why a pattern cannot be used; empty if it can."""
    counts = (_repeats(pattern), pattern.count("?"), pattern.count("("))
    limits = (_MAX_REPEATS, _MAX_OPTIONS + pattern.count("(?"), _MAX_GROUPS)
    if (
        len(pattern) > _MAX_LENGTH
        or _UNBOUNDED.search(pattern)
        or any(count > limit for count, limit in zip(counts, limits, strict=True))
    ):
        return "it is too complex to be evaluated safely; write the modules' names instead"
    try:
        _ending(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _repeats(pattern: str) -> int:
    return sum(pattern.count(sign) for sign in "*+{")


def matching_steps(patterns: Iterable[str], paths: Iterable[str]) -> int:
    """Estimate the steps of matching every pattern with every path's end."""
    repeats = Counter(_repeats(pattern) for pattern in patterns)
    sizes = Counter((len(path), path.count(".") + 1) for path in paths if len(path) <= _MAX_PATH)
    return sum(
        patterns_of * paths_of * (length + ends * math.comb(length, repeat))
        for repeat, patterns_of in repeats.items()
        for (length, ends), paths_of in sizes.items()
    )


def matches_ending(pattern: str, path: str) -> bool:
    """PEFT's rule for rank and alpha patterns (`get_pattern_key`): a pattern names a path's end."""
    return len(path) <= _MAX_PATH and _ending(pattern).match(path) is not None


@lru_cache(maxsize=1024)
def _ending(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


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
    whole = frozenset(map(str, targets)) if isinstance(targets, list) else ()  # a whole path is taken in every layer
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
        pattern = re.compile(names)
        return lambda path: pattern.fullmatch(path) is not None
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
    return _layer_test(whole, [rf"(?:^|.*?\.){prefix}" for prefix in written])


def _layer_test(numbers: Collection[int], prefixes: list[str]) -> Callable[[str], bool]:
    patterns = [re.compile(rf"{prefix}\.(?P<layer>\d+)\.") for prefix in prefixes]

    def test(path: str) -> bool:
        found = (match for pattern in patterns if (match := pattern.match(path)))
        match = next(found, None)
        return match is not None and int(match["layer"]) in numbers

    return test


def _always(path: str) -> bool:
    return True


def _never(path: str) -> bool:
    return False
