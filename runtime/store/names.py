"""Names of adapters: the version that each one means now, and strengths as names."""

import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real

from trt_lora.plugins.errors import (
    AdapterError,
    EvictedAdapterError,
    LoRAError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.plugins.messages import did_you_mean, listed, shown
from trt_lora.runtime.adapters.blend import Parts, Strength, prefixes_of
from trt_lora.runtime.store.blend_source import BlendSource
from trt_lora.runtime.store.entry import Claim, Entry
from trt_lora.runtime.store.source import Fit

_LONGEST = 1024  # characters of a name
_REMEMBERED = 10_000  # names of adapters that cannot be read again
_KEPT_STRENGTHS = 8  # that are not in use; another one of those takes the place of the oldest
_STRENGTH = re.compile(r"(.+)@([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)", re.DOTALL)


class Names:
    """From names to entries; its caller holds the store's lock."""

    def __init__(self, fit: Fit) -> None:
        """Take how adapters are fitted."""
        self.entries: dict[str, Entry] = {}  # in the order of loading
        self.strengths: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._fit = fit
        self._gone: OrderedDict[str, LoRAError] = OrderedDict()  # the oldest first

    def get(self, name: str, expected_version: int | None = None) -> Entry:
        """Return the entry of a name, or of a strength such as "json@0.5".

        Raises:
            UnknownAdapterError: there is none; EvictedAdapterError: there was one.
            StateError: it has another version than expected.
        """
        entry = self.entries.get(name) or self._strength(name)
        if entry is None:
            if gone := self._gone.get(name):
                raise type(gone)(str(gone))  # another object for each thread
            raise unknown_adapter(name, self.entries)
        _check_version(name, entry.version, expected_version)
        return entry

    def blend(self, name: str, parts: Parts) -> BlendSource:
        """Return what a blend of that name is made of.

        Raises:
            UnknownAdapterError, StateError: as `get`, of a part.
            AdapterError: as `check_strengths`; or a part is made of what the blend would replace,
                and would be lost with it.
        """
        strengths = check_strengths(name, parts, [site.path for site in self._fit.manifest.sites])
        found = tuple(map(self.get, parts))
        if lost := [part.name for part in found if _is_made_of(part, name)]:
            raise AdapterError(
                f"blend {name!r} would replace what {lost} are made of, and they would be lost; "
                "choose another name"
            )
        return BlendSource(self._fit, name, tuple(zip(found, strengths, strict=True)))

    def check_new(self, name: str, claim: Claim) -> None:
        """Refuse a name that a new adapter cannot have.

        Raises:
            AdapterError: it is no name, or is taken and nothing says that it may be replaced.
            StateError: it means another version than expected; 0 is none.
        """
        check_name(name)
        entry = self.entries.get(name)
        _check_version(name, entry.version if entry else 0, claim.expected_version)
        if entry and not claim.replace and claim.expected_version is None:
            raise name_is_taken(name)

    def set(self, entry: Entry) -> list[Entry]:
        """Let a name mean an entry from now on; return those that have lost their names to it."""
        self._gone.pop(entry.name, None)
        old = self.entries.get(entry.name)
        self.entries[entry.name] = entry  # in the place of the old one, in the order of loading
        entry.is_named = True
        if old is None:
            return []
        old.is_named = False
        return [old, *self._remove_made_of(old)]

    def remove(self, entry: Entry, why: LoRAError | None = None) -> list[Entry]:
        """Take the name from an entry, and from all that is made of it.

        Args:
            entry: that has its name.
            why: raised where it is asked for from now on.

        Returns:
            Those that have lost their names.
        """
        held = self.strengths if entry.name in self.strengths else self.entries
        del held[entry.name]
        entry.is_named = False
        if why is not None:
            self._remember(entry.name, why)
        return [entry, *self._remove_made_of(entry)]

    def __iter__(self) -> Iterator[Entry]:
        """All entries that have a name."""
        yield from self.entries.values()
        yield from self.strengths.values()

    def idle_strength(self) -> Entry | None:
        """The strength that was used least recently, if more are idle than are kept."""
        if len(self.strengths) <= _KEPT_STRENGTHS:
            return None
        idle = [entry for entry in self.strengths.values() if entry.is_evictable]
        return idle[0] if len(idle) > _KEPT_STRENGTHS else None

    def _remove_made_of(self, entry: Entry) -> list[Entry]:
        lost: list[Entry] = []
        for made in [made for made in self if entry in made.parts]:
            if made.is_named:
                gone = (
                    f"adapter {made.name!r} was made of {entry.name!r}, which was unloaded or "
                    "replaced; blend it again"
                )
                lost += self.remove(made, UnknownAdapterError(gone))
        return lost

    def _strength(self, name: str) -> Entry | None:
        """The entry of "name@scale", made of the adapter that the name means now."""
        if name in self.strengths:
            self.strengths.move_to_end(name)
            return self.strengths[name]
        match = _STRENGTH.fullmatch(name)
        if match is None or match[1] not in self.entries:
            return None
        entry = self.entries[match[1]]
        if (scale := checked_scale(float(match[2]), f"adapter {shown(name)}")) == 1:
            return entry
        source = BlendSource(self._fit, name, ((entry, scale),))
        made = Entry(name, entry.version, source, entry.nbytes, (entry,), is_named=True)
        self.strengths[name] = made
        return made

    def _remember(self, name: str, why: LoRAError) -> None:
        if _STRENGTH.fullmatch(name) is None:
            self._gone[name] = why
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)


def unknown_adapter(name: str, known: Iterable[str]) -> UnknownAdapterError:
    """Return the error of a name that no adapter has."""
    names = list(known)
    return UnknownAdapterError(
        f"unknown adapter {shown(name)}; loaded: {listed(names) or 'none'}"
        f"{did_you_mean(name, names)}"
    )


def name_is_taken(name: str) -> AdapterError:
    """Return the error of a name that another adapter has."""
    return AdapterError(
        f"an adapter named {name!r} is loaded already; choose another name, unload it first, or "
        "pass replace=True"
    )


def evicted(name: str) -> EvictedAdapterError:
    """Return the error of an adapter that cannot be read again."""
    return EvictedAdapterError(
        f"adapter {name!r} was evicted, and its weights came in memory; send them again"
    )


def checked_scale(scale: object, label: str) -> float:
    """Return a strength, or the weight of a blend's part, as a float.

    Raises:
        AdapterError: it is no number, or not finite.
    """
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise AdapterError(
            f"{label}: a scale is a number, got {shown(scale)} ({type(scale).__name__})"
        )
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise AdapterError(f"{label}: a scale is {value}, expected a finite number")
    return value


def check_parts(name: str, parts: Mapping[str, object]) -> list[float]:
    """Return the weights of a blend's parts.

    Raises:
        AdapterError: there are none, one has the blend's own name, or a weight is no finite number.
    """
    _check_part_names(name, parts)
    return [checked_scale(w, _label(name, part)) for part, w in parts.items()]


def check_strengths(name: str, parts: Mapping[str, object], paths: Sequence[str]) -> list[Strength]:
    """Return the strengths of a blend's parts on an engine with sites at `paths`.

    Raises:
        AdapterError: as `check_parts`; or a mapping is empty, or has a prefix that no site has.
    """
    _check_part_names(name, parts)
    return [_checked_strength(s, _label(name, part), paths) for part, s in parts.items()]


def _check_part_names(name: str, parts: Mapping[str, object]) -> None:
    if not parts or name in parts:
        raise AdapterError(
            f"blend {name!r} has no parts, or is one of them: {list(parts)}; name at least one "
            "adapter, and none of the blend's own name"
        )


def _label(name: str, part: str) -> str:
    return f"{name}: adapter {shown(part)}"


def _checked_strength(strength: object, label: str, paths: Sequence[str]) -> Strength:
    if not isinstance(strength, Mapping):
        return checked_scale(strength, label)
    if not strength:
        raise AdapterError(
            f"{label} has no strengths; give a number, or prefixes of module paths, such as "
            f"{{{paths[0].partition('.')[0]!r}: 0.5}}"
        )
    known = dict.fromkeys(prefix for path in paths for prefix in prefixes_of(path))
    for prefix in strength:
        if prefix not in known:
            raise AdapterError(
                f"{label}: no module that takes LoRA is, or begins with, {shown(prefix)}"
                f"{did_you_mean(str(prefix), known)}; prefixes are of whole names between dots, "
                f"such as {listed(list(dict.fromkeys(p.partition('.')[0] for p in paths)))}"
            )
    return {p: checked_scale(scale, f"{label} at {p!r}") for p, scale in strength.items()}


def strength_name(name: str, scale: float) -> str:
    """Return the name of an adapter at a strength: "json@0.5"; at 1 it is the adapter's own."""
    return name if scale == 1 else f"{name}@{scale!r}"


def without_strength(name: str) -> str:
    """Return the name of the adapter itself: that of "json@0.5" is "json"."""
    match = _STRENGTH.fullmatch(name)
    return match[1] if match else name


def check_name(name: str) -> None:
    """Refuse what cannot be the name of an adapter.

    Raises:
        AdapterError: it is empty, too long, no text that can be written, or means a strength.
    """
    if not name:
        raise AdapterError("an adapter needs a name; the empty one means the base model")
    if len(name) > _LONGEST:
        raise AdapterError(
            f"the name of an adapter has at most {_LONGEST} characters, got {len(name)}: "
            f"{shown(name)}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise AdapterError(
            f"the name of an adapter is Unicode text, got {shown(name)}: {error.reason}"
        ) from error
    if match := _STRENGTH.fullmatch(name):
        raise AdapterError(
            f"{shown(name)} means the adapter {shown(match[1])} at strength {match[2]}; choose a "
            "name that does not end in @ and a number"
        )


def _is_made_of(entry: Entry, name: str) -> bool:
    return any(part.name == name or _is_made_of(part, name) for part in entry.parts)


def _check_version(name: str, version: int, expected: int | None) -> None:
    if expected is not None and expected != version:
        raise StateError(
            f"adapter {name!r} is at version {version}, expected {expected}: it was replaced or "
            "unloaded; look at `version` again"
        )
