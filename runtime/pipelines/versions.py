"""What adapters' names mean in a pipeline: a version each, in the stores of several engines."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.store.names import check_name, name_is_taken, unknown_adapter


@dataclass(eq=False)
class Version:
    """One version of an adapter, by its names in the stores of the components that it changes."""

    name: str
    stored: Mapping[str, str]  # by component
    coverage: dict[str, Coverage] = field(default_factory=dict)
    parts: tuple["Version", ...] = ()  # of a blend
    spare: "Version | None" = None  # of a blend: the one before it, whose memory the next one takes
    is_named: bool = False
    is_spare: bool = False
    holders: int = 0  # runs that need it

    @property
    def is_idle(self) -> bool:
        """Whether nothing needs it."""
        return not (self.is_named or self.is_spare or self.holders)

    def with_parts(self) -> Iterator["Version"]:
        """Yield it, and all that it is made of."""
        yield self
        for part in self.parts:
            yield from part.with_parts()


class Versions:
    """From names to versions; any thread may call it.

    A version without a name lives as long as a run holds it. Whoever takes the last name or hold
    from one is given it, to be forgotten by the stores.
    """

    def __init__(self) -> None:
        """Begin without a name."""
        self._lock, self._named = Lock(), dict[str, Version]()
        self._gone = dict[str, str]()  # blends that went with a part -> why

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of loading."""
        with self._lock:
            return tuple(self._named)

    def get(self, name: str) -> Version:
        """Return the version that a name means now.

        Raises:
            UnknownAdapterError: none has it.
        """
        with self._lock:
            return self._get(name)

    def check_new(self, name: str, *, replace: bool) -> None:
        """Refuse what no new version can be called.

        Raises:
            AdapterError: it is no name, or is taken and may not be replaced.
        """
        check_name(name)
        with self._lock:
            if name in self._named and not replace:
                raise name_is_taken(name)

    def hold(self, names: Iterable[str]) -> list[Version]:
        """Return what names mean, all at one moment; it and its parts stay until `release`.

        Raises:
            UnknownAdapterError: none has a name.
        """
        with self._lock:
            versions = [self._get(name) for name in names]
            for each in _with_parts(versions):
                each.holders += 1
            return versions

    def release(self, versions: Iterable[Version]) -> list[Version]:
        """Let go of what `hold` returned; return what is to be forgotten."""
        with self._lock:
            kept = _with_parts(versions)
            for each in kept:
                each.holders -= 1
            return [each for each in dict.fromkeys(kept) if each.is_idle]

    def take_spare(self, name: str, parts: tuple[Version, ...]) -> Version | None:
        """Return the spare version of a blend of the same parts, if it has one that no run needs.

        It is the caller's from then on.
        """
        with self._lock:
            now = self._named.get(name)
            if now is None or now.parts != parts or now.spare is None or now.spare.holders:
                return None
            spare, now.spare = now.spare, None
            spare.is_spare = False
            return spare

    def set(self, version: Version, *, replace: bool) -> list[Version]:
        """Let a name mean a version from now on, on all components at once.

        Returns:
            What is to be forgotten: the old version, and blends of it.

        Raises:
            AdapterError: the name was taken meanwhile.
            UnknownAdapterError: a part of it lost its name meanwhile.
        """
        with self._lock:
            old = self._named.get(version.name)
            if old is not None and not replace:
                raise name_is_taken(version.name)
            for part in version.parts:
                if not part.is_named:
                    raise UnknownAdapterError(_lost(version.name, part.name))
                if old is not None and old in part.with_parts():
                    raise AdapterError(
                        f"blend {version.name!r} would replace what {part.name!r} is made of, "
                        "which would be lost; choose another name"
                    )
            self._gone.pop(version.name, None)
            self._named[version.name] = version
            version.is_named = True
            if old is None:
                return []
            if old.parts and old.parts == version.parts:
                spent, version.spare = old.spare, old
                old.spare, old.is_named, old.is_spare = None, False, True
                return self._without_blends(old) + self._spent(spent)
            return self._without_name(old)

    def remove(self, name: str) -> list[Version]:
        """Take a name away; return what is to be forgotten.

        Raises:
            UnknownAdapterError: none has it.
        """
        with self._lock:
            version = self._get(name)
            del self._named[name]
            return self._without_name(version)

    def _get(self, name: str) -> Version:
        if name in self._named:
            return self._named[name]
        if why := self._gone.get(name):
            raise UnknownAdapterError(why)
        raise unknown_adapter(name, self._named)

    def _without_name(self, version: Version) -> list[Version]:
        """Note that a version has lost its name, and take theirs from blends of it."""
        version.is_named, spare, version.spare = False, version.spare, None
        lost = [*self._spent(spare), *([version] if version.is_idle else [])]
        return self._without_blends(version) + lost  # before what they are made of

    def _without_blends(self, version: Version) -> list[Version]:
        """Take their names from blends of a version; return what is to be forgotten."""
        lost = list[Version]()
        for blend in [each for each in self._named.values() if version in each.parts]:
            del self._named[blend.name]
            self._gone[blend.name] = _lost(blend.name, version.name)
            lost = self._without_name(blend) + lost
        return lost

    @staticmethod
    def _spent(spare: Version | None) -> list[Version]:
        """Note that a spare is none any more."""
        if spare is None:
            return []
        spare.is_spare = False
        return [spare] if spare.is_idle else []


def _with_parts(versions: Iterable[Version]) -> list[Version]:
    return [each for version in versions for each in version.with_parts()]


def _lost(name: str, part: str) -> str:
    return (
        f"adapter {shown(name)} was made of {shown(part)}, which was unloaded or replaced; blend "
        "it again"
    )
