"""Site map: a user's own names for the linears of a graph, and the widths of fused ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trt_lora.plugins.checked import typed
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.files.json_file import read_json

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class SiteMap:
    """What the file of `--site-map` says.

        {"rename": {"attn[.]": "self_attn."}, "parts": {"attn.to_qkv": [64, 32, 32]}}

    Raises:
        ConfigError: a pattern is no regular expression, or its replacement names no group of it.
    """

    # Regular expressions and what takes the place of each match in a path, in this order. A linear
    # without a path gets one where an expression matches the whole name of its node.
    rename: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # widths by end of a path

    def __post_init__(self) -> None:
        """Refuse patterns that cannot be used."""
        for pattern, replacement in self.rename.items():
            try:
                re.compile(f"{pattern}|").sub(replacement, "")
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"--site-map: {pattern!r}: {replacement!r} renames nothing: {error}"
                ) from error

    def renamed(self, path: str) -> str:
        """Return a path with every expression's matches replaced."""
        for pattern, replacement in self.rename.items():
            path = re.sub(pattern, replacement, path)
        return path

    def named(self, node: str) -> str:
        """Return the path of a node that has none, by its name; empty where nothing matches."""
        for pattern, replacement in self.rename.items():
            if match := re.fullmatch(pattern, node):
                return match.expand(replacement)
        return ""

    def widths(self, path: str) -> tuple[int, ...]:
        """Return the widths of a fused linear's parts; empty where the map says nothing of it."""
        ends = (end for end in self.parts if f".{path}".endswith(f".{end}"))
        return next((self.parts[end] for end in ends), ())


def read_site_map(path: Path | None) -> SiteMap:
    """Read a file; None is a map that changes nothing.

    Raises:
        ConfigError: it is not there, no JSON, or has other fields.
    """
    if path is None:
        return SiteMap()
    try:
        site_map: SiteMap = typed(SiteMap, read_json(path, _MAX_BYTES), "site map")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--site-map {path} cannot be read: {error}") from error
    return site_map
