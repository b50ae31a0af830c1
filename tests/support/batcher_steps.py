"""A batcher over fake adapters, and rows that count tokens instead of making them."""

from collections.abc import Sequence

from support.fakes.fake_adapter_cache import FakeAdapterCache, FakeLease

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.choice import Choice
from trt_lora.runtime.serving.lora_batcher import LoRABatcher
from trt_lora.runtime.serving.request import Request

DRAIN_AFTER, LONGEST = 5, 12


class BatcherSteps:
    """A batcher over fake adapters; answers end after as many steps as they have tokens."""

    def __init__(
        self,
        names: str | list[str] = "ABCD",
        slots: int = 1,
        *,
        rows: int = 8,
        is_instant: bool = True,
        drain_after: int = DRAIN_AFTER,
    ) -> None:
        self.cache = FakeAdapterCache(names, slots, is_instant=is_instant)
        self.batcher = LoRABatcher(self.cache, BatcherConfig(drain_after=drain_after))
        self.rows, self.next = rows, 0
        self.left: dict[int, int] = {}  # tokens
        self.adapters: dict[int, str | None] = {}
        self.submitted: dict[int, int] = {}
        self.requests: dict[int, Request] = {}  # as they joined
        self.leases: dict[int, FakeLease | None] = {}
        self.waits: dict[int, int] = {}  # steps at which a request was passed over
        self.failed: dict[int, BaseException] = {}

    def submit(self, *names: str | None, tokens: int = LONGEST) -> int:
        for name in names:
            sampling, arrival = SamplingParams(max_tokens=tokens), self.batcher.steps
            request = Request(self.next, name, (1,), sampling, tokens, arrival=arrival)
            self.batcher.submit(request)
            self.adapters[self.next], self.submitted[self.next] = name, self.batcher.steps
            self.next += 1
        return self.next - 1

    def step(self, count: int = 1) -> Choice[FakeLease]:
        choice: Choice[FakeLease] = Choice(0, {})
        for _ in range(count):
            choice = self.batcher.choose(self.rows - len(self.left))
            self.failed |= choice.failed
            for running in choice.joined:
                number = running.request.id
                self.requests[number] = running.request
                self.leases[number] = running.lease
                self.left[number] = running.request.most_tokens
                self.waits[number] = self.batcher.steps - self.submitted[number] - 1
            self.batcher.check_integrity()
            assert len(self.left) <= self.rows
            self.left = {number: left - 1 for number, left in self.left.items()}
            for number in [number for number, left in self.left.items() if not left]:
                self.end(number)
        return choice

    def end(self, number: int) -> None:
        self.stop(number)
        self.batcher.end(number)
        self.batcher.check_integrity()

    def stop(self, number: int) -> None:
        """Free its row, if it has one."""
        self.left.pop(number, None)
        if lease := self.leases.pop(number, None):
            self.cache.release(lease)

    def preempt(self, number: int) -> None:
        tokens = self.requests[number].most_tokens - self.left[number]
        self.stop(number)
        self.batcher.preempt(number, [7] * tokens)

    def running(self) -> Sequence[str | None]:
        return [self.adapters[number] for number in self.left]
