"""Who joins at a step: within rows and slots, nobody blocked, nobody starved."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.fakes.fake_adapter_cache import FakeAdapterCache, FakeLease

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.generation.sampling import SamplingParams
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.choice import Choice
from trt_lora.runtime.serving.lora_batcher import LoRABatcher
from trt_lora.runtime.serving.request import Request

DRAIN_AFTER, LONGEST = 5, 12
PLACING = 1  # a step between the slot that comes free and the request that joins


class Served:
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
            sampling = SamplingParams(max_new_tokens=tokens)
            self.batcher.submit(Request(self.next, name, (1,), sampling, self.batcher.steps))
            self.adapters[self.next], self.submitted[self.next] = name, self.batcher.steps
            self.next += 1
        return self.next - 1

    def step(self, count: int = 1) -> Choice[FakeLease]:
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


def test_requests_join_when_their_adapter_lies_in_a_slot_and_older_ones_first() -> None:
    served = Served(slots=2, rows=2)
    served.submit("A", "B", "A")
    assert served.step().joined == []  # loads have begun
    assert [r.request.id for r in served.step().joined] == [0, 1]
    assert served.batcher.waiting == 1
    served.end(1)
    assert [r.request.id for r in served.step().joined] == [2]


def test_a_request_whose_adapter_does_not_fit_is_passed_over() -> None:
    served = Served()
    served.submit("A")
    served.step(3)
    served.submit("B", "A", None)
    served.step()
    assert served.running() == ["A", "A", None]


def test_base_rows_need_no_slot() -> None:
    served = Served("ABC", slots=3)
    served.submit("A", "B", None, "C", None)
    served.step(3)
    assert sorted(map(str, served.running())) == ["A", "B", "C", "None", "None"]


def test_adapters_in_slots_go_before_older_requests_of_others() -> None:
    served = Served(slots=2, rows=2)
    served.submit("A", tokens=1)
    served.step(4)
    assert set(served.cache.slots) == {"A"}
    served.submit("B")
    served.submit("A")
    served.step()
    assert served.running() == ["A"]
    served.step(2)
    assert served.running() == ["A", "B"]


@pytest.mark.parametrize("on_host", ["", "AB"], ids=["from disk", "on the host"])
def test_one_slot_is_drained_for_who_was_passed_over(on_host: str) -> None:
    served = Served()
    served.cache.host |= set(on_host)
    served.submit("A")
    served.step(2)
    other = served.submit("B")
    for _ in range(40):
        served.submit("A", tokens=LONGEST)
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + PLACING
    assert max(served.waits.values()) <= 2 * (DRAIN_AFTER + LONGEST + PLACING)


def test_without_draining_it_would_starve() -> None:
    served = Served(drain_after=1000)
    served.submit("A")
    served.step(2)
    other = served.submit("B")
    for _ in range(100):
        served.submit("A", tokens=LONGEST)
        served.step()
    assert other not in served.waits


def test_several_that_starve_are_served_in_turn_each_within_a_longest_answer() -> None:
    served = Served("ABCDE")
    served.submit("A")
    served.step(2)
    others = [served.submit(name) for name in "BCDE"]
    for _ in range(120):
        served.submit("A")
        served.step()
    waits = [served.waits[number] for number in others]
    assert waits == sorted(waits)
    for turn, wait in enumerate(waits, 1):
        assert wait <= DRAIN_AFTER + turn * (LONGEST + PLACING)


def test_as_many_slots_are_drained_as_adapters_starve_and_no_more() -> None:
    served = Served(slots=3, rows=64)
    served.submit("A", "B", "C")
    served.step(3)
    other = served.submit("D")
    joined = []
    for _ in range(DRAIN_AFTER + LONGEST + 5):
        served.submit("A", "B", "C", tokens=3)
        joined.append({served.adapters[r.request.id] for r in served.step().joined})
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + PLACING
    draining = joined[DRAIN_AFTER + 1]
    assert len(draining) == 2
    assert draining < {"A", "B", "C"}


def test_who_takes_a_slot_takes_in_all_that_wait_for_it() -> None:
    served = Served()
    served.submit("A")
    served.step(2)
    others = [served.submit("B") for _ in range(3)]
    for _ in range(40):
        served.submit("A")
        served.step()
    assert len({served.requests[number].arrival + served.waits[number] for number in others}) == 1


def test_half_of_the_running_adapters_go_on() -> None:
    served = Served("ABCDEFGH", slots=4, rows=64)
    served.submit(*"ABCD")
    served.step(3)
    served.submit(*"EFGH")
    served.step(DRAIN_AFTER + 1)
    served.submit(*"ABCD")
    joined = served.step().joined
    assert len({running.request.adapter for running in joined} & set("ABCD")) == 2


def test_a_slot_that_another_thread_frees_is_found() -> None:
    served = Served("AB")
    served.cache.host |= {"A"}
    served.cache.pinned.add(("A", 1))
    number = served.submit("B")
    served.step(3 * DRAIN_AFTER)
    assert number not in served.waits
    served.cache.pinned.clear()
    served.step(10)
    assert number in served.waits


def test_an_adapter_in_a_slot_that_others_hold_all_of_starves_no_more_than_any() -> None:
    served = Served("ADX", slots=2)
    served.submit("D", tokens=1)
    served.step(3)
    served.submit("A")
    served.step(2)
    served.cache.host.add("X")
    served.cache.lease("X")  # by somebody else, who has not used it yet
    assert set(served.cache.slots) == {"A", "D"}
    number = served.submit("D")
    for _ in range(40):
        served.submit("A")
        served.step()
    assert served.waits[number] <= DRAIN_AFTER + LONGEST + PLACING


def test_the_adapter_that_ends_first_is_drained() -> None:
    served = Served(slots=2)
    served.submit("A", tokens=100)
    served.submit("B", tokens=10)
    served.step(2)
    served.submit("C")
    for _ in range(20):
        served.submit("A", "B", tokens=4)
        served.step()
    assert "C" in {served.adapters[number] for number in served.waits}


def test_who_is_drained_stays_so_whatever_ends_sooner_meanwhile() -> None:
    served = Served(slots=2, rows=64)
    served.submit("A", tokens=30)
    served.submit("B", tokens=50)
    served.step(2)
    other = served.submit("C")
    for _ in range(60):
        served.submit("B", tokens=1)
        served.submit("A", tokens=30)
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + 30 + PLACING


def test_a_drain_ends_when_who_waited_is_cancelled() -> None:
    served = Served()
    served.submit("A")
    served.step(2)
    other = served.submit("B")
    served.step(DRAIN_AFTER + 1)
    number = served.submit("A")
    served.step(2)
    assert number not in served.waits
    served.end(other)
    served.step(2)
    assert served.waits[number] == 3


def test_a_preempted_request_goes_back_to_the_front_with_its_tokens() -> None:
    served = Served(rows=1)
    first = served.submit("A", tokens=LONGEST)
    served.step(4)
    served.submit("A")
    served.stop(first)
    served.batcher.preempt(first, [7, 8])
    (running,) = served.step().joined
    assert running.request.id == first
    assert running.request.prompt == (1, 7, 8)
    assert running.request.answered == 2
    assert running.request.most_tokens == LONGEST - 2


def test_preemption_lengthens_no_wait() -> None:
    served = Served()
    first = served.submit("A")
    served.step(2)
    other = served.submit("B")
    served.step(DRAIN_AFTER + 2)
    served.preempt(first)
    for _ in range(40):
        served.submit("A")
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + PLACING


def test_half_an_answer_is_not_ended_by_another_adapter_of_that_name() -> None:
    served = Served()
    first, second = served.submit("A"), served.submit("A")
    served.step(3)
    for number in (first, second):
        served.stop(number)
    served.batcher.preempt(first, [7])
    served.batcher.preempt(second, [])  # nothing of its answer is there
    served.cache.generations["A"] = 2
    served.cache.host.discard("A")
    served.step(3)
    assert "generation 2, not 1" in str(served.failed.pop(first))
    assert not served.failed
    assert list(served.left) == [second]


def test_no_step_waits_for_a_load() -> None:
    served = Served(slots=2, is_instant=False)
    served.submit("A", "B")
    served.step(10)
    assert served.running() == []
    served.cache.end_loads("B")
    served.step()
    assert served.running() == ["B"]  # though A is older
    served.cache.end_loads("A")
    served.step(2)
    assert served.running() == ["B", "A"]


def test_a_slot_is_held_while_an_adapter_is_copied_there() -> None:
    served = Served("AB", is_instant=False)
    served.cache.host |= {"A", "B"}
    served.submit("A")
    served.step()
    assert {lease.name for lease in served.cache.leases} == {"A"}
    served.submit("B")
    served.step(3)
    assert [name for name, _ in served.cache.pending] == ["A"]
    served.cache.end_loads()
    served.step()
    assert served.running() == ["A"]


def test_a_slot_that_nobody_waits_for_any_more_is_given_back() -> None:
    served = Served("AB", is_instant=False)
    served.cache.host |= {"A", "B"}
    first = served.submit("A")
    served.step()
    served.end(first)
    assert not served.cache.leases
    served.submit("B")
    served.step()
    assert {lease.name for lease in served.cache.leases} == {"B"}


def test_a_slot_held_for_what_is_replaced_is_given_back() -> None:
    served = Served("A", is_instant=False)
    served.cache.host |= {"A"}
    served.submit("A")
    served.step()
    served.cache.generations["A"] = 2
    served.cache.end_loads()
    served.step()
    assert {lease.generation for lease in served.cache.leases} == {2}
    served.cache.end_loads()
    served.step()
    assert served.running() == ["A"]


def test_a_load_that_fails_ends_those_who_waited_for_it_and_nobody_else() -> None:
    served = Served("AB", slots=2)
    served.cache.errors["A"] = AdapterError("damaged")
    served.submit("A", "B", "A")
    served.step(3)
    assert {number: str(error) for number, error in served.failed.items()} == {
        0: "damaged",
        2: "damaged",
    }
    assert served.running() == ["B"]


def test_an_adapter_that_is_unloaded_ends_the_requests_that_wait_for_it() -> None:
    served = Served("AB")
    first = served.submit("A")
    served.step(2)
    second = served.submit("A")
    other = served.submit("B")
    del served.cache.generations["A"]
    served.step()
    assert isinstance(served.failed[second], UnknownAdapterError)
    assert first in served.left  # it keeps what it has
    served.step(LONGEST + 2)
    assert other in served.left


def test_what_finds_no_room_on_the_host_is_tried_again_after_others_have_ended() -> None:
    served = Served("AB", slots=2)
    served.submit("A", tokens=6)
    served.step(2)
    served.cache.errors["B"] = StateError("host memory is full")
    number = served.submit("B")
    served.step(3)
    assert served.cache.loads["B"] == 0
    del served.cache.errors["B"]
    served.step(5)
    assert number in served.left


def test_what_never_finds_room_on_the_host_fails() -> None:
    served = Served("AB", slots=2)
    served.submit("A", tokens=6)
    served.step(2)
    served.cache.errors["B"] = StateError("larger than the host memory")
    number = served.submit("B")
    served.step(3)
    assert not served.failed
    served.step(6)
    assert str(served.failed[number]) == "larger than the host memory"


def test_an_unknown_adapter_is_refused_at_once() -> None:
    served = Served()
    with pytest.raises(UnknownAdapterError):
        served.submit("X")
    assert served.batcher.waiting == 0


def test_who_is_nowhere_cannot_end() -> None:
    served = Served()
    with pytest.raises(StateError, match="request 3 does not run"):
        served.batcher.end(3)


def test_few_adapters_are_read_ahead_of_their_turn() -> None:
    names = [f"a{i}" for i in range(50)]
    served = Served(names, slots=2, is_instant=False)
    served.submit(*names)
    served.step(5)
    assert [name for name, _ in served.cache.pending] == names[: BatcherConfig.load_ahead]


def test_who_is_loaded_slowly_does_not_hold_up_who_is_there() -> None:
    names = [f"a{i}" for i in range(9)]
    served = Served(names, slots=2, is_instant=False)
    served.cache.host.add("a8")
    number = served.submit(*names)
    served.step()
    served.cache.end_loads("a8")
    served.step()
    assert list(served.left) == [number]


def test_popular_adapters_keep_nobody_waiting_for_ever() -> None:
    """200 adapters by Zipf's law over 8 slots, at four fifths of what they can serve."""
    rng = np.random.default_rng(0)
    names = [f"a{i}" for i in range(200)]
    shares = 1 / np.arange(1, 201)
    served = Served(names, slots=8, rows=64, drain_after=32)
    for _ in range(1500):
        for name in rng.choice(names, rng.poisson(0.4), p=shares / shares.sum()):
            served.submit(str(name), tokens=32)
        served.step()
    passed = [served.batcher.steps - served.submitted[n] for n in range(served.next)]
    waits = [served.waits.get(number, passed[number]) for number in range(served.next)]
    assert len(waits) > 500
    assert np.percentile(waits, 99) < 32 + 8 * 32
    assert np.percentile(waits, 50) < 32 + 4 * 32


def test_numbers_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="drain_after is -1, expected a whole number from 0 on"):
        BatcherConfig(drain_after=-1)
    with pytest.raises(ConfigError, match="load_ahead is 0"):
        BatcherConfig(load_ahead=0)
