"""One pass over the adapters that wait for a slot."""

from dataclasses import dataclass, field

from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.serving.adapter_loads import AdapterStage
from trt_lora.runtime.serving.serving_config import ServingConfig

_AGAIN = 8  # steps, most: another thread may have freed a slot


@dataclass
class SlotScan:
    """What it is after, and what it has found."""

    step: int
    now: float  # seconds of a monotonic clock
    config: ServingConfig
    rows: int  # free ones that no slot is held for
    most_late: int  # how many adapters can be drained
    scanned: int = 0  # adapters
    is_full: bool = False  # one of them has found no slot
    refused: set[str] = field(default_factory=set)  # all that have found none
    late: list[Sequence] = field(default_factory=list)  # for which adapters are to be drained
    next_step: int = 0  # at which to look again though nothing has happened
    next_time: float = float("inf")  # the same, in seconds

    def __post_init__(self) -> None:
        """Look again for what other threads do."""
        self.next_step = self.step + _AGAIN

    def is_late(self, sequence: Sequence) -> bool:
        """Whether a request has waited too long."""
        steps, seconds = self._bounds(sequence)
        return steps <= self.step or seconds <= self.now

    @property
    def may_read(self) -> bool:
        """Whether the next adapter is to be read from disk."""
        return self.scanned < self.config.prefetch_depth

    def should_continue(self, *, is_late: bool) -> bool:
        """Whether the next adapter is worth looking at, and with it those behind it."""
        can_gain = len(self.late) < self.most_late if is_late else self.rows and not self.is_full
        return self.may_read or bool(can_gain and self.scanned < self.config.scan_limit)

    def record(
        self, sequence: Sequence, name: str, stage: AdapterStage | None, *, is_late: bool
    ) -> None:
        """Keep what has been found out about the adapter of a request."""
        self.scanned += 1
        if stage is AdapterStage.NO_SLOT:
            self.is_full = True
            self.refused.add(name)
        if not is_late:
            steps, seconds = self._bounds(sequence)
            self.next_step = min(self.next_step, steps)
            self.next_time = min(self.next_time, seconds)
        elif (
            stage in (AdapterStage.NO_SLOT, AdapterStage.NO_MEMORY)
            and len(self.late) < self.most_late
        ):
            self.late.append(sequence)

    def _bounds(self, sequence: Sequence) -> tuple[int, float]:
        """The step and the time from which on it is late."""
        waited = self.config.max_wait_s
        return sequence.arrival + self.config.max_wait_steps, sequence.arrived_at + waited
