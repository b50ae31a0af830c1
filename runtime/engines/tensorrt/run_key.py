"""Cache key of one engine run: profile, and address and shape of every binding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trt_lora.plugins.kernels.candidates import CandidateBuffers, LogitsShape

BoundAddress = tuple[int, tuple[int, ...]]  # address and shape of a tensor


class TopKSearch(NamedTuple):
    """A search for the best tokens that follows the engine."""

    shape: LogitsShape
    buffers: CandidateBuffers


@dataclass(frozen=True, eq=False, slots=True)
class RunKey:
    """A run as a dictionary key: found by a digest, taken for equal only if all of it is."""

    profile: int
    addresses: Mapping[str, BoundAddress]
    digest: int
    search: TopKSearch | None = None

    def __hash__(self) -> int:
        """Hash the digest."""
        return hash((self.profile, self.digest))

    def __eq__(self, other: object) -> bool:
        """Compare profile, every address and the search, not the digest."""
        if not isinstance(other, RunKey):
            return NotImplemented
        return (self.profile, self.search) == (other.profile, other.search) and (
            self.addresses == other.addresses
        )


class RunState:
    """The run at hand, brought up to date binding by binding.

    A step changes few of an engine's hundreds of bindings, so that the digest is kept, not made
    anew: it is the exclusive or of the hashes of all addresses, in which one can be exchanged. The
    digest only finds keys. Were it wrong, runs would be taken for different, never for equal.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, BoundAddress] = {}
        self._digest = 0

    @property
    def addresses(self) -> Mapping[str, BoundAddress]:
        """Address and shape by binding."""
        return self._addresses

    def put(self, name: str, address: BoundAddress) -> None:
        """Set the address of one binding."""
        before = self._addresses.get(name)
        if before == address:
            return
        if before is not None:
            self._digest ^= hash((name, before))
        self._digest ^= hash((name, address))
        self._addresses[name] = address

    def key(self, profile: int) -> RunKey:
        """Return the key of this run; it changes with the run, so copy it to keep it."""
        return RunKey(profile, self._addresses, self._digest)


def frozen_copy(key: RunKey) -> RunKey:
    """Return a copy of a key that stays as it is."""
    return RunKey(key.profile, dict(key.addresses), key.digest, key.search)
