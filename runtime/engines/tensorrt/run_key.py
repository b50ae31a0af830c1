"""Cache key of one engine run: profile, and address and shape of every binding."""

from collections.abc import Mapping
from dataclasses import dataclass

Place = tuple[int, tuple[int, ...]]  # address and shape of a tensor


@dataclass(frozen=True, eq=False, slots=True)
class RunKey:
    """A run as a dictionary key: found by a digest, taken for equal only if all of it is."""

    profile: int
    places: Mapping[str, Place]
    digest: int

    def __hash__(self) -> int:
        """Hash the digest."""
        return hash((self.profile, self.digest))

    def __eq__(self, other: object) -> bool:
        """Compare profile and every place, not the digest."""
        if not isinstance(other, RunKey):
            return NotImplemented
        return self.profile == other.profile and self.places == other.places


class RunState:
    """The run at hand, brought up to date binding by binding.

    A step changes few of an engine's hundreds of bindings, so that the digest is kept, not made
    anew: it is the exclusive or of the hashes of all places, in which one can be exchanged. The
    digest only finds keys. Were it wrong, runs would be taken for different, never for equal.
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._digest = 0

    @property
    def places(self) -> Mapping[str, Place]:
        """Address and shape by binding."""
        return self._places

    def put(self, name: str, place: Place) -> None:
        """Set the place of one binding."""
        before = self._places.get(name)
        if before == place:
            return
        if before is not None:
            self._digest ^= hash((name, before))
        self._digest ^= hash((name, place))
        self._places[name] = place

    def key(self, profile: int) -> RunKey:
        """Return the key of this run; it changes with the run, so copy it to keep it."""
        return RunKey(profile, self._places, self._digest)


def kept(key: RunKey) -> RunKey:
    """Return a copy of a key that stays as it is."""
    return RunKey(key.profile, dict(key.places), key.digest)
