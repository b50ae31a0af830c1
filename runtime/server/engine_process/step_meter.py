"""StepMeter: what the steps of an engine took, measured in the thread that makes them."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from trt_lora.runtime.generation.decoding.rows import RowCounts
from trt_lora.runtime.generation.sequence import Sequence as Request
from trt_lora.runtime.generation.token import StepAnswers
from trt_lora.runtime.server.engine_process.wire import RequestTimes

# Upper bounds of buckets, in seconds: all that vLLM has between tokens, and finer ones below.
SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # as vLLM's
KINDS = ("decode", "prefill", "mixed")


class Buckets:
    """A histogram in the making."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begin with nothing."""
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def value(self) -> tuple[list[int], float]:
        """Return how many values lie in each bucket, the last one unbounded; and their sum."""
        return self._counts.copy(), self._total


@dataclass
class _Totals:
    """What is counted since the server takes requests."""

    before: RowCounts  # of the scheduler, when that began
    steps: dict[str, Buckets] = field(
        default_factory=lambda: {kind: Buckets(SECONDS) for kind in KINDS}
    )
    gaps: Buckets = field(default_factory=lambda: Buckets(SECONDS))
    step_tokens: Buckets = field(default_factory=lambda: Buckets(STEP_TOKENS))
    given: int = 0  # tokens


@dataclass
class _Running:
    """A request that has not ended."""

    request: Request
    first_at: float = 0.0  # seconds, as the marks of a `Request`
    last_at: float = 0.0

    def times(self, now: float) -> RequestTimes:
        """Return how long everything took until now."""
        request = self.request
        joined, ready = request.joined_at or now, request.ready_at or request.arrived_at
        return RequestTimes(
            request.answered_by,
            request.cached_tokens or 0,
            joined - request.arrived_at,
            max(ready - request.arrived_at, 0.0),
            (self.first_at or now) - joined,
            now - self.first_at if self.first_at else 0.0,
        )


class StepMeter:
    """Counts steps and the gaps between tokens, and knows how long each request took.

    `step` and `times` are called in the thread of the engine's loop, the others in any.
    """

    def __init__(self, counts: RowCounts, clock: Callable[[], float] = monotonic) -> None:
        """Begin at zero.

        Args:
            counts: of the scheduler, which changes them.
            clock: returns seconds; the one that marks its requests.
        """
        self._counts, self._clock = counts, clock
        self._running: dict[int, _Running] = {}
        self.restart()

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self._running)

    def restart(self) -> None:
        """Begin at zero again: what warmed the engine up was nobody's request."""
        self._last = replace(self._counts)  # at the last step
        self._totals, self._last_given = _Totals(self._last), 0

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests, before any token of them."""
        self._running |= {request.id: _Running(request) for request in requests}

    def drop(self, number: int) -> None:
        """Forget a request that was cancelled."""
        self._running.pop(number, None)

    def step(self, seconds: float) -> None:
        """Count a step, if it has run anything."""
        now, last = replace(self._counts), self._last
        prompts, decoded = now.prompts - last.prompts, now.decoded - last.decoded
        if prompts or decoded:
            kind = "mixed" if prompts and decoded else "prefill" if prompts else "decode"
            self._totals.steps[kind].add(seconds)
            self._totals.step_tokens.add(prompts + self._totals.given - self._last_given)
        self._last, self._last_given = now, self._totals.given

    def times(self, answers: StepAnswers) -> dict[int, RequestTimes]:
        """Count tokens; return the times of requests that have their first one, or have ended."""
        now, found = self._clock(), dict[int, RequestTimes]()
        self._totals.given += len(answers.tokens)
        for number, token in answers.tokens.items():
            running, has_ended = self._running.get(number), token.finish_reason is not None
            if running is None:  # cancelled
                continue
            is_first = not running.first_at
            if is_first:
                running.first_at = now
            else:
                self._totals.gaps.add(now - running.last_at)
            running.last_at = now
            if is_first or has_ended:
                found[number] = running.times(now)
            if has_ended:
                self.drop(number)
        for number in answers.failed:
            if failed := self._running.pop(number, None):
                found[number] = failed.times(now)
        return found

    def values(self) -> dict[str, Any]:
        """Return all that was counted, in values that MessagePack has."""
        totals, now = self._totals, self._counts
        return {
            "steps": {kind: steps.value() for kind, steps in totals.steps.items()},
            "gaps": totals.gaps.value(),
            "step_tokens": totals.step_tokens.value(),
            "given": totals.given,
            "asked": now.asked - totals.before.asked,
            "shared": now.shared - totals.before.shared,
            "preempted": now.preempted - totals.before.preempted,
        }
