"""An admission policy over fake adapters, and rows that count tokens instead of making them."""

from collections import abc

from support.fakes.fake_adapter_store import FakeAdapterStore
from support.fakes.fake_engine import make_manifest

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sequence import Sequence, new_sequence
from trt_lora.runtime.serving.admission import AdmissionPolicy, ScheduledStep
from trt_lora.runtime.serving.serving_config import ServingConfig

DRAIN_AFTER, LONGEST = 5, 12


class PolicySteps:
    """A policy over fake adapters; answers end after as many steps as they have tokens."""

    def __init__(
        self,
        names: str | list[str] = "ABCD",
        slots: int = 1,
        *,
        rows: int = 8,
        is_instant: bool = True,
        max_wait_steps: int = DRAIN_AFTER,
        preempt_after: int = 1000,
    ) -> None:
        self.now = 0.0  # of the clock
        self.cache = FakeAdapterStore(names, slots, is_instant=is_instant)
        config = ServingConfig(max_wait_steps=max_wait_steps, preempt_after=preempt_after)
        self.policy = AdmissionPolicy(self.cache, config, clock=lambda: self.now)
        self.rows, self.next = rows, 0
        self.sequences: dict[int, Sequence] = {}  # all
        self.left: dict[int, int] = {}  # tokens of those that run
        self.submitted: dict[int, int] = {}
        self.waits: dict[int, int] = {}  # steps at which a request was passed over
        self.failed: dict[int, BaseException] = {}
        self.preempted: list[int] = []

    def submit(self, *names: str | None, tokens: int = LONGEST, client: str | None = None) -> int:
        for name in names:
            sampling = SamplingParams(max_tokens=tokens, temperature=0)
            sequence = new_sequence([1], sampling, make_manifest(), None)
            sequence.id, sequence.most, sequence.adapter, sequence.client = (
                self.next,
                tokens,
                name,
                client,
            )
            self.policy.submit(sequence)
            self.sequences[self.next], self.submitted[self.next] = sequence, self.policy.steps
            self.next += 1
        return self.next - 1

    def step(self, count: int = 1) -> ScheduledStep:
        step = ScheduledStep(0, set())
        for _ in range(count):
            step = self.policy.schedule(self.rows - len(self.left))
            self.failed |= {sequence.id: error for sequence, error in step.failed}
            for sequence in step.preempted:
                self.preempted.append(sequence.id)
                self.preempt(sequence.id)
            for sequence in step.joined:
                self.left[sequence.id] = sequence.left
                waited = self.policy.steps - self.submitted[sequence.id] - 1
                self.waits.setdefault(sequence.id, waited)
                self.policy.charge(sequence, len(sequence.prompt))
            self.policy.check_integrity()
            assert len(self.left) <= self.rows
            for number in list(self.left):
                self.left[number] -= 1
                self.sequences[number].answer.append(7)
                self.policy.charge(self.sequences[number], 1)
                if not self.left[number]:
                    self.end(number)
        return step

    def joined(self) -> list[int]:
        """Make a step; return who joined."""
        return [sequence.id for sequence in self.step().joined]

    def end(self, number: int) -> None:
        self.stop(number)
        self.policy.end(self.sequences[number])
        self.policy.check_integrity()

    def stop(self, number: int) -> None:
        """Free its row, if it has one."""
        if self.left.pop(number, None) is not None:
            lease = self.sequences[number].lease
            if lease is not None:
                self.cache.release(lease)

    def preempt(self, number: int) -> None:
        self.stop(number)
        self.policy.preempt(self.sequences[number])
        self.sequences[number].lease = None

    def running(self) -> abc.Sequence[str | None]:
        return [self.sequences[number].adapter for number in self.left]
