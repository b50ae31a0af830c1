"""One look at the adapters without a slot, the one whose request waits longest first."""

from dataclasses import dataclass, field

from trt_lora.runtime.serving.adapter_loads import AdapterStage
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.request import Request

_AGAIN = 8  # steps, most: another thread may have freed a slot


@dataclass
class Look:
    """What it is after, and what it has found."""

    step: int
    config: BatcherConfig
    rows: int  # free ones that no slot is held for
    most_late: int  # how many adapters can be drained
    looked_at: int = 0  # adapters
    is_full: bool = False  # one of them has found no slot
    refused: set[str] = field(default_factory=set)  # all that have found none
    late: list[Request] = field(default_factory=list)  # for which adapters are to be drained
    next_step: int = 0  # at which to look again though nothing has happened

    def __post_init__(self) -> None:
        """Look again for what other threads do."""
        self.next_step = self.step + _AGAIN

    def is_late(self, request: Request) -> bool:
        """Whether a request has been passed over too often."""
        return request.arrival + self.config.drain_after <= self.step

    @property
    def may_read(self) -> bool:
        """Whether the next adapter is to be read from disk."""
        return self.looked_at < self.config.load_ahead

    def goes_on(self, *, is_late: bool) -> bool:
        """Whether the next adapter is worth looking at, and with it those behind it."""
        can_gain = len(self.late) < self.most_late if is_late else self.rows and not self.is_full
        return self.may_read or bool(can_gain and self.looked_at < self.config.look_ahead)

    def note(
        self, request: Request, name: str, stage: AdapterStage | None, *, is_late: bool
    ) -> None:
        """Keep what has been found out about the adapter of a request."""
        self.looked_at += 1
        if stage is AdapterStage.NO_SLOT:
            self.is_full = True
            self.refused.add(name)
        if not is_late:
            self.next_step = min(self.next_step, request.arrival + self.config.drain_after)
        elif (
            stage in (AdapterStage.NO_SLOT, AdapterStage.NO_MEMORY)
            and len(self.late) < self.most_late
        ):
            self.late.append(request)
