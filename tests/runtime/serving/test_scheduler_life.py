"""A scheduler through any life: who is answered is answered rightly, and everybody ends.

Loads end late, in any order of other events. The law: a request is answered by the version that
its adapter's name meant when it joined, or fails and says why; the cache, the leases and the rows
add up after every event; and once nothing is pinned, all that is left is answered within a bound.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.deferred_executor import DeferredExecutor
from support.fakes.slot_engine import SlotEngine, expected_answer, number_file
from support.schedulers import scheduler_of

from trt_lora.plugins.errors import StateError, UnknownAdapterError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.source import FileSource, Fit
from trt_lora.runtime.store.store import AdapterStore

SLOTS, ROWS, LONGEST = 2, 3, 6
NAMES = st.sampled_from("abcd")
# Many begin alike, with so many tokens that a row is shared.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 96), min_size=1, max_size=7),
    st.builds(
        lambda common, rest: [*range(common), *rest],
        st.integers(1, 12),
        st.lists(st.integers(0, 3), max_size=2),
    ),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, LONGEST),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 3),
    ignore_eos=st.just(True),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 97, 5))]),
)


def running_of(scheduler: Scheduler) -> set[int]:
    """Return who has a row."""
    return {sequence.id for sequence in scheduler._rows.sequences}


@dataclass
class Asked:
    """A request, and what it was given."""

    name: str | None
    prompt: list[int]
    sampling: SamplingParams
    number: int | None = None  # of the adapter that answers, once it has joined
    tokens: list[int | None] = field(default_factory=list)


class SchedulerLife(RuleBasedStateMachine):
    """Any order of calls on two slots, three rows and a host for three adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.background, self.engine = DeferredExecutor(), SlotEngine(SLOTS, ROWS)
        self.numbers: dict[str, int] = {}  # that names mean
        self.pinned: set[str] = set()
        self.asked: dict[int, Asked] = {}  # those that have not ended
        self.last_number = 0

    @initialize(
        chunk=st.sampled_from([1, 3, 16]),
        host=st.sampled_from([None, 3, 4]),
        preempt_after=st.sampled_from([0, 2, 100]),
        shares=st.booleans(),
    )
    def begin(self, chunk: int, host: int | None, preempt_after: int, shares: bool) -> None:
        source = FileSource(Fit(self.engine.manifest, 1), self.file(), strict=True)
        room = None if host is None else host * source.preview().nbytes
        self.adapters = AdapterStore(self.engine, StoreConfig(host_memory=room))
        self.adapters._prefetcher._thread = self.background  # type: ignore[assignment]
        self.scheduler = scheduler_of(
            self.engine,
            self.adapters,
            max_wait_steps=3,
            prefetch_depth=2,
            preempt_after=preempt_after,
            max_num_batched_tokens=chunk,
            shares_prefixes=shares,
        )
        for name in "abc":
            self.register(name)

    @rule(name=NAMES)
    def register(self, name: str) -> None:
        if name not in self.numbers:
            self.adapters.register(name, self.file())
            self.numbers[name] = self.last_number

    @rule(name=NAMES)
    def replace(self, name: str) -> None:
        try:
            self.adapters.load(name, self.file(), replace=True)
        except StateError:  # the host has no room for both
            return
        self.numbers[name] = self.last_number  # a pin stays

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        if name in self.numbers:
            self.adapters.unload(name)
            del self.numbers[name]
            self.pinned.discard(name)

    @rule(name=NAMES)
    def pin(self, name: str) -> None:
        if name in self.numbers and len(self.pinned | {name}) < SLOTS:
            try:
                self.adapters.pin(name)
            except StateError:  # slots or host memory are in use
                return
            self.pinned.add(name)

    @rule()
    def unpin(self) -> None:
        while self.pinned:
            self.adapters.unpin(self.pinned.pop())

    @rule(count=st.integers(1, 3))
    def end_loads(self, count: int) -> None:
        self.background.run(count)

    @rule(
        name=st.one_of(st.none(), NAMES),
        prompt=PROMPTS,
        sampling=SAMPLING,
        client=st.sampled_from(["x", "y", "z"]),
        salt=st.sampled_from([None, "s"]),
    )
    def submit(
        self,
        name: str | None,
        prompt: list[int],
        sampling: SamplingParams,
        client: str,
        salt: str | None,
    ) -> None:
        if name is not None and name not in self.numbers:
            with pytest.raises(UnknownAdapterError):
                self.scheduler.submit(prompt, sampling, adapter=name)
            return
        given = {"client": client, "salt": salt}
        request = self.scheduler.submit(prompt, sampling, adapter=name, **given)
        self.asked[request] = Asked(name, prompt, sampling)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            answers = self.scheduler.step()
            seen = running_of(self.scheduler) | answers.tokens.keys()
            for request, asked in self.asked.items():
                if request not in seen and not asked.tokens:
                    asked.number = None  # if it was preempted, it begins anew
                elif request in seen and asked.number is None:
                    asked.number = self.numbers[asked.name] if asked.name else 0
            for request, token in answers.tokens.items():
                self.asked[request].tokens.append(token.token_id)
                if token.finish_reason:
                    self.check_answer(self.asked.pop(request))
            for request, error in answers.failed.items():
                self.check_failure(self.asked.pop(request), error)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.asked)))
        self.scheduler.cancel(request)
        del self.asked[request]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.asked)))
        if request not in running_of(self.scheduler):
            with pytest.raises(StateError, match=f"request {request} has no row"):
                self.scheduler.preempt(request)
            return
        self.scheduler.preempt(request)
        if not self.asked[request].tokens:
            self.asked[request].number = None  # it begins anew

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert len(self.scheduler) == len(self.asked)
            assert self.scheduler.running <= ROWS

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.unpin()
            bound = (len(self.asked) + 1) * (LONGEST + 14 + 3 + 2)
            for _ in range(bound):
                self.end_loads(10)
                self.step(1)
            assert not self.asked
            assert not self.adapters._levels.leases
            self.adapters.check_integrity()
        self.folder.cleanup()

    def file(self) -> Path:
        self.last_number += 1
        return number_file(Path(self.folder.name), self.last_number % 89 + 1)

    def check_answer(self, asked: Asked) -> None:
        assert asked.number is not None
        number = asked.number % 89 + 1 if asked.name else 0
        assert asked.tokens == expected_answer(asked.prompt, number, asked.sampling)

    def check_failure(self, asked: Asked, error: BaseException) -> None:
        """It says what is so."""
        assert asked.name is not None
        if isinstance(error, UnknownAdapterError):
            assert asked.name not in self.numbers
        else:
            assert isinstance(error, StateError)
            is_replaced = asked.tokens and asked.number != self.numbers.get(asked.name)
            assert is_replaced or "host memory" in str(error)


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
